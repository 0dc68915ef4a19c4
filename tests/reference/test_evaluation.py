"""The evaluation's figures against transformers alone, on tiny random models in float32."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Glm4Config

from model_patches.plan import make_plan
from model_patches.rope_config import read_geometry
from service.core import Segment
from service.evaluation import decode, entropy, likelihood
from service.evaluation.schemes import SchemeAsked
from service.evaluation.unrotated import UnrotatedModel
from tests.reference.growing import SHAPE
from tests.reference.harness import Float64Rotary, reference_logits
from tests.reference.supported import FAMILIES
from tests.reference.unrotated import grown_logits
from tests.service.evaluation.tiny import CONFIG, TinyBench, model_of

NATS = 1e-3
SLIDING = Gemma3TextConfig(
    **{
        **SHAPE,
        "head_dim": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)


def nll_of(logits: torch.Tensor, following: list[int]) -> list[float]:
    return torch.nn.functional.cross_entropy(logits.double(), torch.tensor(following), reduction="none").tolist()


@pytest.mark.parametrize("length", [48, 120])
@pytest.mark.parametrize(("scheme", "factor"), [("yarn", 2.0), ("ntk", 4.0)])
def test_negative_log_likelihoods_are_those_of_a_transformers_loop(
    tmp_path: Path, scheme: str, factor: float, length: int
) -> None:
    tried = TinyBench(tmp_path / "cells", schemes=f"{scheme}:{factor}", lengths=(48, 120))
    ledger = tried.compute(likelihood.jobs(tried.bench))
    found = likelihood.scores(tried.bench, ledger, likelihood.choices(tried.bench), 120)
    geometry, model = tried.policy.geometry, model_of(CONFIG)
    plan = make_plan(geometry, scheme, factor, int(factor * 64))
    unscaled = make_plan(geometry, "default", 1.0, 64)
    rows = found[SchemeAsked(scheme, factor), length]
    for document, ours in zip(tried.bench.cut(120), rows, strict=True):
        prompt = document[: length - 1]
        theirs = nll_of(reference_logits(model, plan, prompt[:-1], 0), prompt[1:])
        assert len(ours) == length - 2
        assert np.abs(ours - theirs).max() <= NATS
        other = nll_of(reference_logits(model, unscaled, prompt[:-1], 0), prompt[1:])
        assert abs(ours.mean() - np.mean(other)) > 10 * NATS


def crossed(folder: Path) -> tuple[TinyBench, decode.Crossing, list[int], dict[str, list[float]]]:
    """A tiny model with native length 18, and what each way made of one document."""
    tried = TinyBench(folder / "cells", documents=1, native_length=18)
    place = decode.crossing(tried.policy)
    ledger = tried.compute(decode.jobs(tried.bench))
    [document] = tried.bench.cut(place.end)
    found = {
        way: ledger[decode._key(way, decode._choice(tried.policy, place, way), document, place)]["nll"]
        for way in decode.WAYS
    }
    return tried, place, document, found


def test_each_way_across_the_native_length_is_what_its_name_says(tmp_path: Path) -> None:
    tried, place, document, found = crossed(tmp_path)
    assert (place.start, place.native, place.end) == (9, 18, 72)
    rungs = [tried.policy.plan(None, rung) for rung in tried.policy.rungs]
    covers = [rung.max_length for rung in rungs]
    assert covers == [18, 22, 27, 36, 45, 54, 72]
    known, given = document[:-1], document[place.start :]
    model = model_of(CONFIG)

    fresh = []  # each token under the first rung that covers it, and all before it too
    for number in range(place.start - 1, len(known)):
        plan = next(rung for rung in rungs if number < rung.max_length)
        fresh += nll_of(reference_logits(model, plan, known[: number + 1], number), [document[number + 1]])
    assert np.abs(np.subtract(found["re-prefilled"], fresh)).max() <= NATS

    stages = [(min(rung.max_length, len(known)), [Segment(0, rung)]) for rung in rungs]
    histories = [
        (until, [Segment(start, segment.plan)]) for (until, [segment]), start in zip(stages, [0, *covers], strict=False)
    ]
    never_rotated = nll_of(grown_logits(model, "half", known, place.start - 1, histories), given)
    assert np.abs(np.subtract(found["unrotated"], never_rotated)).max() <= NATS
    assert np.abs(np.subtract(found["re-rotated"], never_rotated)).max() <= NATS

    before = place.native - place.start + 1
    stale = np.subtract(found["stale"], never_rotated)
    assert np.abs(stale[:before]).max() <= NATS
    assert np.abs(stale[before:]).mean() > 50 * NATS
    assert np.abs(np.subtract(found["re-prefilled"], never_rotated)[before:]).mean() > NATS


def test_stale_keys_are_left_in_no_cache(tmp_path: Path) -> None:
    tried, place, document, found = crossed(tmp_path)
    choice = decode._choice(tried.policy, place, "re-rotated")
    prompt, given = document[: place.start], document[place.start :]
    again = tried.bench.driver.force(prompt, given, choice)
    assert np.abs(np.subtract(again, found["re-rotated"])).max() <= NATS
    assert not tried.pages.num_kept


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        Glm4Config(**{**deepcopy(SHAPE), "head_dim": 16, "partial_rotary_factor": 0.5}),
        SLIDING,
        FAMILIES["gemma2, soft caps, windows in some layers"],
        FAMILIES["qwen2-moe, windows in some layers"],
    ],
    ids=["half", "interleaved, half of each head", "windows with a rotation of their own", "soft caps", "own windows"],
)
def test_the_unrotated_reference_is_transformers_where_nothing_grows(config: Any) -> None:
    geometry = read_geometry(config.to_dict())
    plan = make_plan(geometry, "yarn", 2.0, 128)
    tokens = torch.randint(128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    model = UnrotatedModel(model_of(config), geometry)
    logits = torch.cat([model.forward(tokens[:140], plan, 140), model.forward(tokens[140:], plan, 3)])
    expected = reference_logits(model_of(config), plan, tokens, 0)
    assert torch.allclose(logits[:140], expected[:140], atol=2e-4, rtol=0)
    assert torch.allclose(logits[140:], expected[147:], atol=2e-4, rtol=0)


def test_entropy_is_that_of_transformers_own_attention_weights(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells", schemes="yarn:4", lengths=(100,), documents=1)
    ledger = tried.compute(jobs := entropy.jobs(tried.bench))
    [job] = jobs
    values = ledger[job.key]
    [document] = tried.bench.cut(100)
    plan = make_plan(tried.policy.geometry, "yarn", 4.0, 256)
    assert plan.attention_factor > 1.1
    model = model_of(CONFIG)
    model.model.rotary_emb = Float64Rotary(plan, 8)
    with torch.inference_mode():
        weights = model(torch.tensor([document]), use_cache=False, output_attentions=True).attentions
    assert values["layers"] == [0, 1, 2]
    for place, layer in enumerate(values["layers"]):
        seen = weights[layer][0, :, -entropy.QUERIES :].double()
        # What a factor out of the logits leaves: softmax(l / m²) is softmax(l)^(1 / m²), made to sum to 1 again.
        flatter = seen ** (1 / plan.attention_factor**2)
        flatter /= flatter.sum(dim=-1, keepdim=True)
        for name, chances in (("with", seen), ("without", flatter)):
            expected = float(torch.special.entr(chances).sum(dim=-1).mean())
            assert values[name][place] == pytest.approx(expected, abs=1e-4), (name, layer)
    assert all(less < more for less, more in zip(values["with"], values["without"], strict=True))
