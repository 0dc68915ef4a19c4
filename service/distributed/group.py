"""The processes that a model is split over, as torch.distributed knows them.

Collectives are the model's own business and run over this group; what rank 0 decides travels over connections of their
own (`service.distributed.leader`), for those may wait as long as no request comes.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from service.distributed.place import Place

LOOPBACK = "lo"
STARTING = timedelta(minutes=30)
"""How long a rank waits for others that read their weights more slowly. Lost ones are noticed at once."""


def backend_of(device: torch.device) -> str:
    """torch's name of the library that ranks on such devices talk through."""
    return "nccl" if device.type == "cuda" else "gloo"


def join(place: Place, device: torch.device, store: Store) -> torch.device:
    """Make this process a rank of the default group; returns when all have come.

    Args:
        place: of this process.
        device: of its kind are all of them.
        store: that all ranks share.

    Returns:
        The device of this rank.
    """
    os.environ["LOCAL_RANK"] = str(place.local_rank)  # transformers takes a rank's device from it
    if device.type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    else:
        if place.local_size == place.size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // place.local_size))
    dist.init_process_group(backend_of(device), rank=place.rank, world_size=place.size, store=store, timeout=STARTING)
    return device


def smallest(number: int, device: torch.device) -> int:
    """The smallest of all ranks' numbers."""
    found = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)
