"""A tiny random model on the evaluation's bench, and in a folder."""

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from model_patches.pages import KeyValuePages
from model_patches.patch import PatchedModel
from model_patches.rope_config import read_geometry
from service.cache.pages import PageAllocator
from service.cache.pool import CacheShape, allocate_pool
from service.engine.runner import ModelRunner
from service.evaluation.bench import Bench
from service.evaluation.driver import Driver
from service.evaluation.ledger import Job, Ledger
from service.evaluation.schemes import parse_schemes
from service.evaluation.texts import Text, builtin_text, tokenize
from service.evaluation.unrotated import UnrotatedModel
from service.scaling.policy import Policy
from tests.reference.growing import SHAPE, tiny
from tests.serving import byte_tokenizer

CONFIG = LlamaConfig(**deepcopy(SHAPE), eos_token_id=0)
NATIVE_LENGTH = 64
NUM_PAGES, PAGE_SIZE = 80, 4


def text_of(characters: int) -> str:
    """Real text, one token for each character."""
    return builtin_text().content.encode("ascii", "ignore").decode()[:characters]


def model_of(config: Any) -> Any:
    """A model of random weights, the same for every call, large enough for positions to matter."""
    return tiny(config, std=0.5)


@dataclass
class TinyBench:
    """A bench with everything that a test looks at.

    Attributes:
        schemes: as on the command line.
        lengths: in tokens.
        documents: at most.
        characters: of the text, which is real.
        config: of the model.
        native_length: of the policy.
        ledger_file: where cells are kept.
    """

    ledger_file: Path
    schemes: str = "default,linear:2,yarn:2,policy"
    lengths: tuple[int, ...] = (32, 64, 96)
    documents: int = 3
    characters: int = 4000
    config: Any = field(default_factory=lambda: CONFIG)
    native_length: int = NATIVE_LENGTH
    references: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.policy = Policy(read_geometry(self.config.to_dict()), native_length=self.native_length)
        model = PatchedModel(model_of(self.config), self.policy.geometry, fuse=False)
        shape = CacheShape(model.layers, PAGE_SIZE, model.kv_heads, model.key_dim, model.value_dim, model.dtype)
        self.layers: list[KeyValuePages] = allocate_pool(shape, NUM_PAGES, torch.device("cpu"))
        self.pages = PageAllocator(NUM_PAGES, PAGE_SIZE)
        self.runner = ModelRunner(model, self.layers)
        self.tokenizer = byte_tokenizer().backend_tokenizer
        self.bench = Bench(
            driver=Driver(self.runner, self.pages, self.tokenizer, max_batch_tokens=16),
            policy=self.policy,
            tokenizer=self.tokenizer,
            reference=self._reference,
            schemes=parse_schemes(self.schemes),
            lengths=self.lengths,
            streams=tokenize([Text("text", text_of(self.characters))], self.tokenizer),
            documents=self.documents,
        )
        self.ledger = Ledger(self.ledger_file, {})

    def _reference(self) -> UnrotatedModel:
        self.references += 1
        return UnrotatedModel(model_of(self.config), self.policy.geometry)

    def compute(self, jobs: list[Job]) -> Ledger:
        """Compute all, and see that no page is left behind."""
        for job in jobs:
            self.ledger.compute(job)
        assert self.pages.num_used == 0
        self.pages.check()
        return self.ledger


def save_tiny(folder: Path) -> Path:
    """The tiny model as a Hugging Face folder, its tokens ASCII characters."""
    model_of(CONFIG).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
