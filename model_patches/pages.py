"""The paged memory of rotated keys and of values, in whatever type they are kept.

Knows pages, slots and how numbers are packed into them. Does not know which sequence a page is of, nor attention.
"""

from dataclasses import dataclass

import torch

SCALE_DTYPE = torch.float16
"""Of the scales that go with int8: one for each token and head."""
_INT8_MAX = 127
_SCALES = torch.finfo(SCALE_DTYPE)
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class PagedTensor:
    """One layer's keys or values.

    bfloat16, float16 and float32 are kept as they are; float8_e4m3fn is clamped to ±448 first, for torch would make NaN
    of more; int8 goes with scales: a number is its integer times the scale of its token and head, off by half a scale
    at most.

    Attributes:
        data: [pages, page_size, kv_heads, dim].
        scales: float16 [pages, page_size, kv_heads], the largest magnitude / 127; for int8 only, None otherwise.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def allocate(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> "PagedTensor":
        """Reserve memory without writing to it.

        Args:
            shape: pages, page_size, kv_heads, dim.
            dtype: of the data.
            device: where it lives.
        """
        scales = torch.empty(shape[:3], dtype=SCALE_DTYPE, device=device) if dtype == torch.int8 else None
        return cls(torch.empty(shape, dtype=dtype, device=device), scales)

    @property
    def shape(self) -> torch.Size:
        """[pages, page_size, kv_heads, dim]."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def zero_(self) -> None:
        """Make every number 0."""
        for tensor in self._tensors():
            tensor.zero_()

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write tokens into their slots.

        Args:
            slots: int64 [T], page × page_size + offset in the page.
            rows: [T, kv_heads, dim], of any floating type.
        """
        for tensor, packed in zip(self._tensors(), self._pack(rows), strict=True):
            tensor.flatten(0, 1).index_copy_(0, slots, packed)

    def load(self, pages: torch.Tensor) -> torch.Tensor:
        """What some pages hold.

        Args:
            pages: int64 [n].

        Returns:
            float32 [n, page_size, kv_heads, dim].
        """
        return self.gather(pages, torch.float32)

    def store(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Write whole pages; of what `load` gave it makes the same bits again.

        Args:
            pages: int64 [n].
            content: float32 [n, page_size, kv_heads, dim].
        """
        for tensor, packed in zip(self._tensors(), self._pack(content), strict=True):
            tensor.index_copy_(0, pages, packed)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages bit for bit.

        Args:
            source: int64 [n], the pages to read.
            target: int64 [n], the pages to write, none twice.
        """
        for tensor in self._tensors():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def gather(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What some pages hold, as attention needs it.

        Args:
            pages: int32 or int64 [n].
            dtype: of the result; int8 and its scales are multiplied in float32 and rounded to it once.

        Returns:
            [n, page_size, kv_heads, dim].
        """
        data = _bits(self.data).index_select(0, pages).view(self.dtype)
        if self.scales is None:
            return data.to(dtype)
        scales = self.scales.index_select(0, pages)
        return (data.float() * scales.float()[..., None]).to(dtype)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory, as index operations take it."""
        return (_bits(self.data),) if self.scales is None else (self.data, self.scales)

    def _pack(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The numbers [..., dim] as they are kept, one tensor for each of `_tensors`."""
        if self.scales is not None:
            return _quantise(numbers.float())
        if self.dtype == torch.float8_e4m3fn:
            numbers = numbers.clamp(-_FP8_MAX, _FP8_MAX)
        return (_bits(numbers.to(self.dtype)),)


@dataclass(frozen=True)
class KeyValuePages:
    """The paged pool of one layer: rotated keys and values, alike in all but the size of a head."""

    keys: PagedTensor
    values: PagedTensor

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write tokens into their slots.

        Args:
            slots: int64 [T], page × page_size + offset in the page.
            key: rotated keys, [T, kv_heads, key_dim].
            value: [T, kv_heads, value_dim].
        """
        self.keys.write(slots, key)
        self.values.write(slots, value)


def _quantise(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., dim] → int8 [..., dim] and float16 scales [...].

    Scales stay in float16's normal range, where they are rounded so finely that the largest number still comes out at
    127.
    """
    largest = numbers.abs().amax(dim=-1)
    scales = (largest / _INT8_MAX).clamp(_SCALES.tiny, _SCALES.max).to(SCALE_DTYPE)
    integers = (numbers / scales.float()[..., None]).round().clamp(-_INT8_MAX, _INT8_MAX)
    return integers.to(torch.int8), scales


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Float8 as the bytes it is made of, for index operations on it are missing; other types as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
