"""The engine over a tiny model that is split over two processes of this machine, which talk through gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from service import build
from service.cache.pages import PageAllocator
from service.distributed import spawned
from service.distributed.leader import Leader, LeadingRunner
from service.distributed.meeting import StartedRanks
from service.engine.engine import Engine
from service.metrics import Metrics
from service.scheduler.scheduler import Scheduler
from service.settings import Settings
from tests.fakes import ByteStream
from tests.reference.growing import tiny
from tests.reference.harness import RealEngine, RecordingRunner
from tests.serving import byte_tokenizer


@dataclass
class SplitEngine(RealEngine):
    """`RealEngine` whose model is rank 0's part; the rest is behind the leader.

    Attributes:
        computing: what rank 0 has loaded.
        leader: of the others.
    """

    computing: build.LoadedRunner = field(kw_only=True)
    leader: Leader = field(kw_only=True)

    def __post_init__(self) -> None:
        shape, local = self.computing.shape, self.computing.runner
        self.pages = PageAllocator(self.computing.num_pages, shape.page_size)
        self.runner = RecordingRunner(local.model, local.pool, tuple(local.groups))
        self.scheduler = Scheduler(
            self.pages,
            max_running=self.max_running,
            max_batch_tokens=self.max_batch_tokens,
            prefix_caching=True,
            windows=self.computing.needs.windows,
        )
        leading, metrics = LeadingRunner(self.runner, self.leader), Metrics(CollectorRegistry())
        self.engine = Engine(leading, self.scheduler, ByteStream, metrics, page_bytes=shape.page_bytes)


@contextmanager
def split_engine(config: Any, folder: Path, **options: Any) -> Iterator[SplitEngine]:
    """An engine over `tiny(config)` in float32, split over two processes; neither is lost while the block runs.

    Args:
        config: of the model.
        folder: where it can be saved.
        options: of the engine.
    """
    tiny(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    asked = {"model": str(folder), "dtype": "float32", "device": "cpu", "native_rope": "config"}
    settings = Settings.model_validate({**asked, "tensor_parallel": 2, "kv_cache_memory": 2**25})
    inspected = build.inspect(settings)
    lost: list[Exception] = []
    leader = Leader(StartedRanks(settings.tensor_parallel, spawned.run), lost.append)
    try:
        computing, _ = build.load_with_others(settings, inspected, leader)
        model = computing.weights.loaded.model
        yield SplitEngine(model, inspected.policy, computing=computing, leader=leader, **options)
    finally:
        leader.close()
    assert not lost
