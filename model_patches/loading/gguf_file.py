"""Reading what a GGUF model says about itself.

Knows the file's keys and the `gguf` package. Does not know transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray

from model_patches.errors import DamagedModelError, UnsupportedModelError


class GgufFile:
    """The metadata and the tensor table of one model; weights are mapped, not read.

    Attributes:
        path: of the first part, or of the only one.
        parts: in order; the keys of the model are in the first.
        metadata: the model's keys and their values.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """
        Args:
            paths: all parts of the model, in order; see `gguf_parts.parts_of`.

        Raises:
            UnsupportedModelError: a tensor of a type that the `gguf` package does not know, or a part whose name does
                not say so.
            DamagedModelError: a file that is not a GGUF file or is cut short, or parts that are not of one model.
        """
        self.path = paths[0]
        self.parts = [_open(path) for path in paths]
        self.metadata: Mapping[str, Any] = _contents(self.parts[0])
        self._tensors = {tensor.name: tensor for part in self.parts for tensor in part.tensors}
        _check_numbers(paths, self.parts)
        if "general.architecture" not in self.metadata:
            raise DamagedModelError(f"{self.path} does not name its architecture (general.architecture)")
        expected, found = self.metadata.get("split.tensors.count"), len(self._tensors)
        if expected not in (None, found):
            raise DamagedModelError(f"the {len(paths)} parts of {self.path} hold {found} tensors, expected {expected}")

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the model's family, such as "llama" or "qwen2"."""
        return str(self.metadata["general.architecture"])

    @property
    def tensor_types(self) -> Mapping[str, GGMLQuantizationType]:
        """How each tensor is stored, by its name."""
        return {name: tensor.tensor_type for name, tensor in self._tensors.items()}

    def of_architecture(self, key: str) -> Any | None:
        """The value under the architecture's own prefix: "rope.freq_base" → llama.rope.freq_base. None if absent."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def required(self, key: str) -> Any:
        """As `of_architecture`; raises DamagedModelError if absent."""
        value = self.of_architecture(key)
        if value is None:
            raise DamagedModelError(f"{self.path} does not say {self.architecture}.{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number that holds for every layer.

        Raises:
            DamagedModelError: it is absent and there is no default.
            UnsupportedModelError: the file says one for each layer.
        """
        value = self.of_architecture(key)
        if value is None:
            value = self.required(key) if default is None else default
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self.path} says another {self.architecture}.{key} for some layers than for others, "
                    "which cannot be read; use the model's Hugging Face folder instead"
                )
            value = value[0]
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A number, which GGUF keeps in float32, as the shortest decimal that gives it: 1e-05, not 9.99999974e-06."""
        value = self.of_architecture(key)
        return default if value is None else float(str(np.float32(value)))

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor, rows before columns; raises DamagedModelError if the file has none of that name."""
        if tensor not in self._tensors:
            raise DamagedModelError(f"the weights of {self.path} lack {tensor}")
        return tuple(int(size) for size in reversed(self._tensors[tensor].shape))

    def floats(self, tensor: str) -> NDArray[np.float32] | None:
        """A tensor unpacked, rows before columns; None if the file has none of that name."""
        found = self._tensors.get(tensor)
        return None if found is None else dequantize(found.data, found.tensor_type)


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        if GGMLQuantizationType.__name__ in str(error):
            raise UnsupportedModelError(f"{path} stores tensors in a way that is not known here: {error}") from error
        raise DamagedModelError(f"{path} is not a complete GGUF file ({error}); fetch it again") from error


def _contents(part: GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in part.fields.items()}


def _check_numbers(paths: Sequence[Path], parts: Sequence[GGUFReader]) -> None:
    for index, (path, part) in enumerate(zip(paths, parts, strict=True)):
        said = [part.fields[key].contents() if key in part.fields else None for key in ("split.no", "split.count")]
        number, count = said
        if (number or 0, count or 1) == (index, len(paths)):
            continue
        if len(paths) == 1:
            raise UnsupportedModelError(
                f"{path} is one of {count} parts of a GGUF model, but its name does not say which: "
                f"give all of them back their names, {path.stem}-00001-of-{count:05}.gguf and so on"
            )
        raise DamagedModelError(
            f"{path} is named part {index + 1} of {len(paths)} of a GGUF model, "
            f"but says that it is part {(number or 0) + 1} of {count or 1}"
        )
