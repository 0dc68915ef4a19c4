"""A GGUF model in several files: which files those are.

Knows how llama.cpp's gguf-split names its parts. Does not know what a model is made of.
"""

import re
from pathlib import Path

from model_patches.errors import DamagedModelError

_PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def model_name_of(path: Path) -> str:
    """The file's name without its suffix and without the number of a part."""
    part = _PART.fullmatch(path.name)
    return part["model"] if part else path.stem


def parts_of(path: Path) -> list[Path]:
    """All files of the model that a file belongs to, in order: the file alone, unless its name is that of a part.

    Raises:
        DamagedModelError: parts are not there; the message names them.
    """
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part["count"])
    parts = [
        path.with_name(f"{part['model']}-{number:05}-of-{part['count']}{part['suffix']}")
        for number in range(1, count + 1)
    ]
    if path not in parts:
        raise DamagedModelError(f"{path} is named part {int(part['number'])} of {count}, which no model has")
    if missing := [other.name for other in parts if not other.is_file()]:
        raise DamagedModelError(
            f"{path} is one of {count} parts of a GGUF model; not in its folder: {', '.join(missing)}"
        )
    return parts
