"""What CUDA graphs do, on a CPU: a computation is noted operator by operator and done again in the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_patches.recorded import Recording

aten = torch.ops.aten
ASKS_THE_DEVICE = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default),
    *(aten.repeat_interleave.Tensor, aten.bincount.default),
}
"""What CUDA does not record, for the host would have to wait for an answer."""
BY_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Where truth values among the indices are counted first."""
COPIES_FROM_THE_HOST = {aten.lift_fresh.default}


class Tape(TorchDispatchMode):
    """Notes what is computed while it is entered.

    Raises:
        RuntimeError: from whatever asks for an answer or brings a constant along; torch raises it then, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func in BY_INDICES else ()
        by_truth = any(index is not None and index.dtype == torch.bool for index in indices)
        if by_truth or func in ASKS_THE_DEVICE | COPIES_FROM_THE_HOST:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        """Compute everything again, into the memory of the first time."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """A recorder that counts its recordings and replays."""

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Recording:
        self.recordings += 1
        with Tape() as tape:
            output = compute()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return Recording(replay, output)
