"""Reading what a GGUF file says about itself.

Knows the file's keys and the `gguf` package. Does not know transformers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from model_patches.errors import DamagedModelError, UnsupportedModelError

_ONE_OF_MANY = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


class GgufFile:
    """The metadata and the tensor table of one file; weights are mapped, not read.

    Raises:
        UnsupportedModelError: the file is one part of several.
        DamagedModelError: it is not a GGUF file, or it is cut short.
    """

    def __init__(self, path: Path) -> None:
        if _ONE_OF_MANY.search(path.name):
            raise UnsupportedModelError(
                f"{path} is one part of a GGUF model in several files, which is not supported; "
                "merge the parts first (llama-gguf-split --merge)"
            )
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise DamagedModelError(f"{path} is not a complete GGUF file ({error}); fetch it again") from error
        self.path = path
        self.metadata: Mapping[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(f"{path} is one part of a GGUF model in several files; merge the parts first")
        if "general.architecture" not in self.metadata:
            raise DamagedModelError(f"{path} does not name its architecture (general.architecture)")

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the model's family, such as "llama" or "qwen2"."""
        return str(self.metadata["general.architecture"])

    def of_architecture(self, key: str) -> Any | None:
        """The value under the architecture's own prefix: "rope.freq_base" → llama.rope.freq_base. None if absent."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def required(self, key: str) -> Any:
        """As `of_architecture`; raises DamagedModelError if absent."""
        value = self.of_architecture(key)
        if value is None:
            raise DamagedModelError(f"{self.path} does not say {self.architecture}.{key}")
        return value

    def floats(self, tensor: str) -> NDArray[np.float32] | None:
        """A tensor that is stored as float32, None if the file has none of that name."""
        found = self._tensors.get(tensor)
        return None if found is None else np.asarray(found.data, dtype=np.float32)
