"""Settings that do not go with a model that is split over several processes."""

import os

import torch

from service.distributed.place import given_place
from service.errors import StartupError
from service.settings import Settings

_IN_ONE_PROCESS = {
    "deterministic": "needs decoder layers that run fused, in one process",
    "quantization": "packs whole weights",
    "lora_adapter": "is merged into whole weights",
}


def check_split(settings: Settings, device: torch.device) -> None:
    """Refuse what cannot be had together.

    Args:
        settings: of a server with tensor_parallel above 1.
        device: where its model will run.

    Raises:
        StartupError: the message names both settings.
    """
    asked = f"tensor_parallel ({settings.tensor_parallel})"
    for name, why in _IN_ONE_PROCESS.items():
        if value := getattr(settings, name):
            raise StartupError(f"{name} ({value}) {why}: it does not go with {asked}")
    if device.type == "cpu" and torch.cuda.is_available():
        raise StartupError(
            f"device is cpu, but torch sees CUDA devices, and transformers would put the ranks of {asked} there: "
            "hide them with CUDA_VISIBLE_DEVICES="
        )
    place = given_place(os.environ, settings.tensor_parallel)
    ranks_here = settings.tensor_parallel if place is None else place.local_size
    if device.type == "cuda" and ranks_here > torch.cuda.device_count():
        raise StartupError(f"{asked} needs {ranks_here} CUDA devices here, torch sees {torch.cuda.device_count()}")
