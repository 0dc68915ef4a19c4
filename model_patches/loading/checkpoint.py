"""Whether a Hugging Face folder can be served, told from its config.json and its file names.

Knows which architectures are supported and why others are refused. Loads no weights and needs no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_patches.errors import DamagedModelError, ModelNotFoundError, UnsupportedModelError

SUPPORTED_ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MinistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "GPTNeoXForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "GraniteForCausalLM",
    "StableLmForCausalLM",
    "CohereForCausalLM",
    "HeliumForCausalLM",
    "Ernie4_5ForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "BloomForCausalLM",
    "MptForCausalLM",
    "XGLMForCausalLM",
    "OPTForCausalLM",
    "GPT2LMHeadModel",
)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as it stands there; nothing else in the folder is needed.

    Raises:
        ModelNotFoundError: the folder has no config.json.
        DamagedModelError: it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises DamagedModelError where the file does not hold one JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedModelError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise DamagedModelError(f"{path} does not hold a JSON object")
    return content


def check_config(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> None:
    """Refuse a model that would not run, or would run wrongly, before anything of it is loaded.

    Raises:
        UnsupportedModelError: another architecture, quantised weights, or code of its own without leave to run it.
    """
    _check_architecture(config)
    _check_quantization(config)
    if "auto_map" in config and not trust_remote_code:
        raise UnsupportedModelError(
            "the model brings Python code of its own (auto_map in config.json), which is not run unless asked for; "
            "pass --trust-remote-code if you trust its author"
        )


def check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors: pickled weights can run any code when they are read.

    Raises:
        UnsupportedModelError: the folder has pickled weights only.
        ModelNotFoundError: it has no weights at all.
    """
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise UnsupportedModelError(
            f"{folder} has pickled weights only ({pickles[0]}), which are not loaded; convert them to safetensors"
        )
    raise ModelNotFoundError(f"{folder} has no weights: no *.safetensors file (pickled weights are not loaded)")


def _check_architecture(config: Mapping[str, Any]) -> None:
    named = config.get("architectures") or []
    if named and named[0] in SUPPORTED_ARCHITECTURES:
        return
    what = f"the architecture {named[0]!r} is not supported" if named else "config.json names no architecture"
    raise UnsupportedModelError(f"{what}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _check_quantization(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return
    raise UnsupportedModelError(
        f"the weights are quantised ({_quantization_method(quantization)}), which is not supported; "
        "use the model's unquantised checkpoint, or a GGUF file, which is unpacked once"
    )


def _quantization_method(quantization: Mapping[str, Any]) -> str:
    if method := quantization.get("quant_method"):
        return str(method)
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"
    return "an unnamed method"
