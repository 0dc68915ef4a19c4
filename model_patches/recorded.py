"""Decode steps recorded once for each number of rows and replayed: on CUDA, as CUDA graphs.

A step of one token for each of its sequences launches the same kernels whatever its plans, positions and pages are,
for all of these are tensors. Launching them from Python takes longer than they run, so they are launched once while
CUDA takes note, and later by one call, on what lies in the same memory then.

Knows a step's tensors and one function that computes it. Does not know the model's insides, or which sequences run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import pad

from model_patches.attention import PagedBatch
from model_patches.errors import UnsupportedModelError
from model_patches.pages import KeyValuePages
from model_patches.rotary import FrequencyTable

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]
"""As `PatchedModel.forward`."""
_DENSE = 8  # steps of fewer rows than this are recorded for powers of 2, of more for its multiples
# Relative to the norm of the logits, or of a layer's new keys and values. A replay runs the kernels of the step that it
# is compared with over the same shapes, so they should be equal bit for bit; this is for libraries that choose anew.
_AGREEMENT = 0.02


@dataclass(frozen=True)
class Recording:
    """A computation that was recorded.

    Attributes:
        replay: computes it again, on what lies in the memory of its arguments now.
        output: where the result is.
    """

    replay: Callable[[], None]
    output: torch.Tensor


Recorder = Callable[[Callable[[], torch.Tensor]], Recording]
"""Computes something while it is recorded. It may only launch kernels: whatever it decides on the host, a replay takes
over."""


class CudaRecorder:
    """Records CUDA graphs that share their memory: no two of them may run at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # One for all: what libraries set up for a stream is then made before anything is recorded, and once.
        self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Recording:
        """Run a computation twice: first for what libraries set up when they first run, then recorded.

        Raises:
            RuntimeError: it asks the device for an answer. That is found out in the first run, for a recording that
                fails cannot be cleared away.
        """
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        strictness = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                compute()
        finally:
            torch.cuda.set_sync_debug_mode(strictness)
            own.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Whatever becomes of the recording, this thread is on its own stream again afterwards; what other threads do
        # (the metrics read the device's memory) does not spoil it.
        with (
            torch.cuda.stream(own),
            torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"),
        ):
            output = compute()
        return Recording(graph.replay, output)


@dataclass(frozen=True)
class DecodeShape:
    """What all decode steps of a server have in common.

    Attributes:
        layers: of the model, each one's pages. The last page of the pool must be nobody's: rows that a recording has
            beyond those of a step write there.
        windows: of each group of layers that keeps pages of its own, see `PagedBatch.window`.
        group_of: of each layer, which of the groups it is in.
        longest: tokens of the longest sequence.
        most_rows: of a step.
    """

    layers: Sequence[KeyValuePages]
    windows: Sequence[int | None]
    group_of: Sequence[int]
    longest: int
    most_rows: int

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows to record, rising: 1, 2, 4, 8, 16, 24, … to the first that is no less than most_rows."""
        sizes = [1]
        while sizes[-1] < self.most_rows:
            sizes.append(sizes[-1] + min(sizes[-1], _DENSE))
        return sizes


class RecordedDecoding:
    """Decode steps of any number of rows, by the next larger recording.

    The arguments lie in memory that all recordings read, the smaller ones its beginning.
    """

    def __init__(self, forward: Forward, frequencies: FrequencyTable, shape: DecodeShape, record: Recorder) -> None:
        """
        Args:
            forward: computes a step, unrecorded.
            frequencies: of the plans. Recordings read its memory: when it moves, they take no steps any more.
            shape: of the steps.
            record: on the device where the model runs.
        """
        self._forward = forward
        self._frequencies = frequencies
        self._shape = shape
        self._record = record
        self._recordings: dict[int, Recording] = {}
        self._read = frequencies.inv_freq
        self._idle_page, self._page_size = shape.layers[0].keys.shape[0] - 1, shape.layers[0].keys.shape[1]
        rows, device = shape.sizes[-1], shape.layers[0].keys.data.device
        pages = -(-shape.longest // self._page_size)
        self._token_ids, self._positions, self._plan_rows = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._seqused_k = torch.ones(rows, dtype=torch.int32, device=device)
        self._slots = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in shape.windows]
        self._tables = [torch.zeros(rows, pages, dtype=torch.int32, device=device) for _ in shape.windows]

    def takes(self, token_ids: torch.Tensor, logits_at: torch.Tensor, batch: PagedBatch) -> bool:
        """Whether a step is a decode step: one token for each sequence, and logits after each."""
        if self._frequencies.inv_freq is not self._read:
            return False
        return len(token_ids) == len(logits_at) == len(batch.query_lengths) <= self._shape.sizes[-1]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan_rows: torch.Tensor,
        logits_at: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """A decode step, as `PatchedModel.forward`. The logits are good until the next step."""
        del logits_at  # all of them
        count = len(token_ids)
        size = next(size for size in self._shape.sizes if size >= count)
        self._be_idle(size, count)
        for held, given in (
            (self._token_ids, token_ids),
            (self._positions, positions),
            (self._plan_rows, plan_rows),
            (self._seqused_k, batch.seqused_k),
        ):
            held[:count].copy_(given)
        for group, slots, table in zip(batch.groups or (batch,), self._slots, self._tables, strict=True):
            slots[:count].copy_(group.slots)
            table[:count, : group.block_table.shape[1]].copy_(group.block_table)
        self._recordings[size].replay()
        return self._logits[:count]

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every size, and compare a replay of each with the same step unrecorded. The pool is overwritten.

        Raises:
            UnsupportedModelError: attention goes one sequence at a time, or logits come out different.
            RuntimeError: torch's, where something asks for an answer of the device while it records, or memory is out.
        """
        sizes = self._shape.sizes[::-1]  # what the largest needs is room enough for the others
        self._be_idle(sizes[0], 0)
        self._logits = self._compute(sizes[0])
        for size in sizes:
            self._be_idle(size, 0)
            self._recordings[size] = self._record(partial(self._compute_in_place, size))
        for row in (-2, -1):  # which no plan has yet
            self._read[row] = -row * 0.5 ** torch.arange(self._read.shape[1], device=self._read.device)
            self._frequencies.attention_factor[row] = 1.0
        for size in sizes:
            self._make_up(size)
            self._fill_pool()
            self._recordings[size].replay()
            replayed = [self._logits[:size].clone(), *self._written(size)]
            self._fill_pool()
            expected = [self._compute(size), *self._written(size)]
            for ours, theirs in zip(replayed, expected, strict=True):
                difference = float((ours - theirs).norm() / theirs.norm())
                if not difference <= _AGREEMENT:
                    message = f"what a replay of {size} rows computes is off by {difference:.2g} of its norm"
                    raise UnsupportedModelError(message)

    def _compute_in_place(self, size: int) -> torch.Tensor:
        """The same, its logits in memory that all recordings share."""
        return self._logits[:size].copy_(self._compute(size))

    def _fill_pool(self) -> None:
        """With noise, the same each time."""
        device = self._token_ids.device
        generator = torch.Generator(device).manual_seed(0)
        for layer in self._shape.layers:
            for pages in (layer.keys, layer.values):
                pages.data.normal_(generator=generator)

    def _written(self, size: int) -> list[torch.Tensor]:
        """Each layer's keys and values in the slots of the first rows, float32."""
        groups = self._shape.group_of or [0] * len(self._shape.layers)
        return [
            pages.data.flatten(0, 1).index_select(0, self._slots[group][:size]).float()
            for layer, group in zip(self._shape.layers, groups, strict=True)
            for pages in (layer.keys, layer.values)
        ]

    def _compute(self, size: int) -> torch.Tensor:
        """The step that lies in the first rows, unrecorded."""
        arguments = (self._token_ids[:size], self._positions[:size], self._plan_rows[:size])
        return self._forward(*arguments, torch.arange(size, device=self._token_ids.device), self._batch(size))

    def _batch(self, size: int) -> PagedBatch:
        groups = list(self._batches(size))
        if len(groups) == 1:
            return groups[0]
        return replace(groups[0], groups=groups, group_of=self._shape.group_of)

    def _batches(self, size: int) -> Iterator[PagedBatch]:
        """One for each group of layers."""
        lengths = self._seqused_k[:size]
        cu_seq_k = pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        cu_seq_q = torch.arange(size + 1, dtype=torch.int32, device=lengths.device)
        for slots, table, window in zip(self._slots, self._tables, self._shape.windows, strict=True):
            yield PagedBatch(
                layers=self._shape.layers,
                query_lengths=[1] * size,
                key_lengths=[self._shape.longest] * size,
                slots=slots[:size],
                block_table=table[:size],
                cu_seq_q=cu_seq_q,
                cu_seq_k=cu_seq_k,
                seqused_k=lengths,
                window=window,
                lengths_are_bounds=True,
            )

    def _be_idle(self, size: int, count: int) -> None:
        """Make the rows from `count` to `size` sequences of one token on the page that is nobody's."""
        if count == size:
            return
        rest = slice(count, size)
        for held in (self._token_ids, self._positions, self._plan_rows):
            held[rest].zero_()
        self._seqused_k[rest].fill_(1)
        for slots, table in zip(self._slots, self._tables, strict=True):
            slots[rest].fill_(self._idle_page * self._page_size)
            table[rest, 0].fill_(self._idle_page)

    def _make_up(self, size: int) -> None:
        """Make all rows unlike each other and unlike idle ones: each a sequence on pages and places of its own, every
        other one of two pages and under another plan, so short that each key counts."""
        rows = torch.arange(size, device=self._token_ids.device)
        positions = (rows % 2 * self._page_size + (1 + rows) % self._page_size).clamp(max=self._shape.longest - 1)
        self._token_ids[:size] = 1 + rows % 16
        self._positions[:size] = positions
        self._plan_rows[:size] = len(self._read) - 1 - rows % 2
        self._seqused_k[:size] = positions + 1
        for slots, table in zip(self._slots, self._tables, strict=True):
            table[:size] = ((2 * rows + 1) % self._idle_page)[:, None]
            table[:size, 0] = 2 * rows % self._idle_page
            pages = table[:size].gather(1, positions[:, None] // self._page_size)[:, 0]
            slots[:size] = pages * self._page_size + positions % self._page_size
