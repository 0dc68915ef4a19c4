"""A GGUF model in several files: which files those are, and one file made of them.

Knows how llama.cpp's gguf-split names its parts. Does not know what a model is made of.
"""

import re
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys

from model_patches.errors import DamagedModelError

_PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
# What the writer writes itself, and what holds of a part alone.
_NOT_COPIED = ("GGUF.", "split.", Keys.General.ARCHITECTURE)


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


def write_merged(parts: list[GGUFReader], target: Path) -> None:
    """Write one file with the keys of the first part and the tensors of all, as they are stored.

    Raises:
        DamagedModelError: two parts hold a tensor of the same name.
    """
    first = parts[0]
    writer = GGUFWriter(target, first.fields[Keys.General.ARCHITECTURE].contents(), endianess=first.endianess)
    for field in first.fields.values():
        if not field.name.startswith(_NOT_COPIED):
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    tensors = [tensor for part in parts for tensor in part.tensors]
    try:
        for tensor in tensors:
            stored = tensor.data
            writer.add_tensor_info(tensor.name, stored.shape, stored.dtype, stored.nbytes, tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data, tensor_endianess=first.endianess)
    except ValueError as error:
        raise DamagedModelError(f"the parts of {target.name} cannot be put together: {error}") from error
    finally:
        writer.close()
