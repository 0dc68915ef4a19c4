"""What a cache in int8 costs in quality: perplexity of a real text, against the same model with bfloat16 pages."""

import logging
import math
from pathlib import Path

import pytest
import torch

from model_patches.loading.load import load_model
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from service.cache.pool import CacheShape, allocate_pool
from service.core import PageTable, SamplingParams, Sequence
from service.engine import batch
from service.scaling.policy import Policy
from tests.reference.text import real_text

CPU = torch.device("cpu")
LENGTH, STEP, PAGE_SIZE = 4000, 125, 16
logger = logging.getLogger(__name__)


def perplexity(folder: Path, kv_dtype: torch.dtype) -> float:
    """exp of the mean negative log-likelihood of a text's tokens 1 to LENGTH − 1, read in steps of STEP tokens.

    Every token attends over what the pages hold: of earlier steps and of its own.
    """
    loaded = load_model(folder, dtype=torch.bfloat16, device=CPU)
    tokens = loaded.tokenizer.backend_tokenizer.encode(real_text()[:60_000], add_special_tokens=False).ids[:LENGTH]
    policy = Policy(read_geometry(loaded.config))
    model = PatchedModel(loaded.model, policy.geometry)
    shape = CacheShape(model.layers, PAGE_SIZE, model.kv_heads, model.key_dim, model.value_dim, kv_dtype)
    layers = allocate_pool(shape, LENGTH // PAGE_SIZE, CPU)
    choice = policy.choose(LENGTH, 1)
    sequence = Sequence("text", tokens, choice, SamplingParams(max_tokens=1), deliver=lambda _: None)
    sequence.tables = [PageTable(0, list(range(LENGTH // PAGE_SIZE)))]
    total = 0.0
    for start in range(0, LENGTH, STEP):
        sequence.num_computed = start
        step = batch.build({sequence: STEP}, layers, model.plan_row, CPU)
        logits = model.forward(step.token_ids, step.positions, step.plan_rows, torch.arange(STEP), step.batch)
        following = torch.tensor(tokens[start + 1 : start + STEP + 1])
        total += float(torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum"))
    return math.exp(total / (LENGTH - 1))


@pytest.mark.long
def test_perplexity_over_int8_pages_is_within_1_percent_of_that_over_bfloat16_pages(
    embedded_model_folder: Path,
) -> None:
    expected, found = (perplexity(embedded_model_folder, dtype) for dtype in (torch.bfloat16, torch.int8))
    logger.warning("perplexity of %d tokens: bfloat16 pages %.4f, int8 pages %.4f", LENGTH, expected, found)
    assert expected < 20, "the model does not read the text"
    assert found == pytest.approx(expected, rel=0.01)
