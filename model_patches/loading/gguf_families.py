"""The families of GGUF files that can be read: each one's config, from the file's keys and tensors.

What a file does not say (activations, patterns of layers, which norms there are) is what llama.cpp's own code does for
the family. Knows llama.cpp's keys and transformers' config fields. Does not know how weights are stored on disk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_patches.errors import UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.gguf_layouts import (
    Layout,
    as_stored,
    gates_and_ups_in_turn,
    head_by_head,
    neighbours_paired,
    norms_from_one,
    transposed,
)
from model_patches.loading.gguf_rope import THETA, head_dim_of, rope_parameters_of

Fields = dict[str, Any]

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose queries are scaled by hidden size / heads


@dataclass(frozen=True)
class GgufFamily:
    """How files of one architecture become a model.

    Attributes:
        config: the fields of its config; `architectures` names transformers' class.
        layout: puts its weights into the order of that class.
        reads: keys that change answers and that `config` takes over, of those that are refused elsewhere.
    """

    config: Callable[[GgufFile], Fields]
    layout: Layout = as_stored
    reads: frozenset[str] = frozenset()


# Keys that change answers, and the values at which they do not. Of a family that does not read them they are refused.
_CHANGE_ANSWERS: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # not said, softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "nextn_predict_layers": (0,),
}


def gguf_family(file: GgufFile) -> GgufFamily:
    """The family of a file.

    Raises:
        UnsupportedModelError: its architecture is not known, or it says something that its family does not read.
    """
    family = GGUF_FAMILIES.get(file.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{file.path} is a GGUF file of the architecture {file.architecture!r}; "
            f"supported: {', '.join(GGUF_FAMILIES)}"
        )
    for key, neutral in _CHANGE_ANSWERS.items():
        if key not in family.reads and (value := file.of_architecture(key)) not in (None, *neutral):
            raise UnsupportedModelError(
                f"{file.path} says {file.architecture}.{key} {value}, "
                "which cannot be read from a file of this architecture; use the model's Hugging Face folder instead"
            )
    if (width := file.of_architecture("attention.value_length")) not in (None, head_dim_of(file)):
        raise UnsupportedModelError(
            f"{file.path} has heads {head_dim_of(file)} wide but {file.architecture}.attention.value_length {width}, "
            "which cannot be read from a GGUF file; use the model's Hugging Face folder instead"
        )
    return family


def _has(file: GgufFile, tensor: str) -> bool:
    return tensor in file.tensor_types


def _size(file: GgufFile) -> Fields:
    """What every family has."""
    return {
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": file.count("embedding_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": file.count("attention.head_count"),
        "tie_word_embeddings": not _has(file, "output.weight"),
    }


def _rotary(file: GgufFile, *, partial: bool = False) -> Fields:
    return {
        **_size(file),
        "intermediate_size": file.count("feed_forward_length"),
        "num_key_value_heads": file.count("attention.head_count_kv", file.count("attention.head_count")),
        "head_dim": head_dim_of(file),
        "max_position_embeddings": file.count("context_length"),
        "rope_parameters": rope_parameters_of(file, partial=partial),
    }


def _rms(file: GgufFile, architecture: str, *, partial: bool = False) -> Fields:
    """A rotary decoder with RMS norms."""
    epsilon = {"rms_norm_eps": file.number("attention.layer_norm_rms_epsilon", 1e-5)}
    return {"architectures": [architecture], **_rotary(file, partial=partial), **epsilon}


def _epsilon(file: GgufFile) -> float:
    return file.number("attention.layer_norm_epsilon", 1e-5)


def _plain(architecture: str, **fixed: Any) -> Callable[[GgufFile], Fields]:
    def config(file: GgufFile) -> Fields:
        return {**_rms(file, architecture), **fixed}

    return config


def _biases(file: GgufFile) -> Fields:
    return {
        "attention_bias": _has(file, "blk.0.attn_output.bias"),
        "mlp_bias": _has(file, "blk.0.ffn_down.bias"),
    }


def _llama(file: GgufFile) -> Fields:
    if experts := file.count("expert_count", 0):
        used = {"num_local_experts": experts, "num_experts_per_tok": file.count("expert_used_count")}
        return {**_rms(file, "MixtralForCausalLM"), **used, "sliding_window": None}
    return {**_rms(file, "LlamaForCausalLM"), **_biases(file)}


def _phi3(file: GgufFile) -> Fields:
    fields = _rms(file, "Phi3ForCausalLM", partial=True)
    original = fields["rope_parameters"].get("original_max_position_embeddings", fields["max_position_embeddings"])
    window = file.count("attention.sliding_window", 0) or None  # Phi-4's files say 0
    return {**fields, "sliding_window": window, "original_max_position_embeddings": original}


def _experts(file: GgufFile) -> Fields:
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
    }


def _qwen2moe(file: GgufFile) -> Fields:
    shared = {"shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length")}
    return {**_rms(file, "Qwen2MoeForCausalLM"), **_experts(file), **shared}


def _qwen3moe(file: GgufFile) -> Fields:
    return {**_rms(file, "Qwen3MoeForCausalLM"), **_experts(file), "norm_topk_prob": True}


def _gemma(file: GgufFile, architecture: str) -> Fields:
    fields = _rms(file, architecture)
    largest = fields["num_hidden_layers"] == _GEMMA_27B[file.architecture]
    scale = fields["hidden_size"] // fields["num_attention_heads"] if largest else fields["head_dim"]
    return {**fields, "query_pre_attn_scalar": scale}


def _gemma2(file: GgufFile) -> Fields:
    return {
        **_gemma(file, "Gemma2ForCausalLM"),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "sliding_window": file.count("attention.sliding_window", 4096),
        "layer_types": _layer_types(file, period=2),
    }


def _gemma3(file: GgufFile) -> Fields:
    fields = _gemma(file, "Gemma3ForCausalLM")
    return {
        **fields,
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": _layer_types(file, period=6),
        "rope_parameters": _by_layer_type(file, fields["rope_parameters"], local_theta=THETA),
    }


def _gpt_oss(file: GgufFile) -> Fields:
    fields = _rms(file, "GptOssForCausalLM")
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as OpenAI's code; llama.cpp rounds the bounds
    return {
        **fields,
        "intermediate_size": file.count("expert_feed_forward_length"),
        "num_local_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": _layer_types(file, period=2),
    }


def _olmo2(file: GgufFile) -> Fields:
    """OLMo 3 goes by the name of OLMo 2, but has windows."""
    if not (window := file.count("attention.sliding_window", 0)):
        return _rms(file, "Olmo2ForCausalLM")
    fields = _rms(file, "Olmo3ForCausalLM")
    rope = fields["rope_parameters"]
    return {
        **fields,
        "sliding_window": window,
        "layer_types": _layer_types(file, period=4),
        "rope_parameters": _by_layer_type(file, rope, local_theta=rope["rope_theta"]),
    }


def _granite(file: GgufFile) -> Fields:
    return {
        **_rms(file, "GraniteForCausalLM"),
        "attention_multiplier": file.number("attention.scale", 0.0) or head_dim_of(file) ** -0.5,
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
        **_biases(file),
    }


def _glm4(file: GgufFile) -> Fields:
    return {**_rms(file, "Glm4ForCausalLM", partial=True), "attention_bias": _has(file, "blk.0.attn_q.bias")}


def _command_r(file: GgufFile) -> Fields:
    return {
        **_rotary(file),
        "architectures": ["CohereForCausalLM"],
        "layer_norm_eps": _epsilon(file),
        "logit_scale": file.number("logit_scale", 1.0),
        "use_qk_norm": _has(file, "blk.0.attn_q_norm.weight"),
    }


def _stablelm(file: GgufFile) -> Fields:
    return {
        **_rotary(file, partial=True),
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": _epsilon(file),
        "use_qkv_bias": _has(file, "blk.0.attn_q.bias"),
        "use_parallel_residual": not _has(file, "blk.0.ffn_norm.weight"),
    }


def _phi2(file: GgufFile) -> Fields:
    architecture = {"architectures": ["PhiForCausalLM"], "layer_norm_eps": _epsilon(file)}
    return {**_rotary(file, partial=True), **architecture}


def _gptneox(file: GgufFile) -> Fields:
    return {
        **_rotary(file, partial=True),
        "architectures": ["GPTNeoXForCausalLM"],
        "layer_norm_eps": _epsilon(file),
        "use_parallel_residual": bool(file.required("use_parallel_residual")),
    }


def _starcoder2(file: GgufFile) -> Fields:
    """All its models have a window of 4,096, which files do not say."""
    return {
        **_rotary(file),
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": _epsilon(file),
        "sliding_window": file.count("attention.sliding_window", 4096),
    }


def _falcon(file: GgufFile) -> Fields:
    """Falcon-7B shares one key among all heads; 40B and 11B have several, and a second norm or not."""
    groups, second_norm = file.count("attention.head_count_kv", 1), _has(file, "blk.0.attn_norm_2.weight")
    several = groups > 1 or second_norm
    return {
        **_size(file),
        "architectures": ["FalconForCausalLM"],
        "ffn_hidden_size": file.count("feed_forward_length"),
        "num_kv_heads": groups,
        "new_decoder_architecture": several,
        "num_ln_in_parallel_attn": (2 if second_norm else 1) if several else None,
        "max_position_embeddings": file.count("context_length"),
        "layer_norm_epsilon": _epsilon(file),
        "rope_parameters": rope_parameters_of(file, partial=False),
    }


def _bloom(file: GgufFile) -> Fields:
    return {
        **_size(file),
        "architectures": ["BloomForCausalLM"],
        "layer_norm_epsilon": _epsilon(file),
        "seq_length": file.count("context_length"),
    }


def _gpt2(file: GgufFile) -> Fields:
    return {
        **_size(file),
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": file.count("context_length"),
        "n_inner": file.count("feed_forward_length"),
        "layer_norm_epsilon": _epsilon(file),
    }


def _mpt(file: GgufFile) -> Fields:
    attention = {
        "alibi": bool(slope := file.number("attention.max_alibi_bias", 0.0)),
        "alibi_bias_max": int(slope),
        "clip_qkv": file.number("attention.clamp_kqv", 0.0) or None,
    }
    return {
        **_size(file),
        "architectures": ["MptForCausalLM"],
        "max_seq_len": file.count("context_length"),
        "layer_norm_epsilon": _epsilon(file),
        "attn_config": attention,
    }


def _by_layer_type(file: GgufFile, rope: Fields, *, local_theta: float) -> Fields:
    """Scaling is for the layers that see everything; those with a window may have a base of their own."""
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", local_theta)}
    return {"full_attention": rope, "sliding_attention": local}


def _layer_types(file: GgufFile, *, period: int) -> list[str]:
    """Which layers see a window: all but each period's last, unless the file says another period, or each layer."""
    pattern, layers = file.of_architecture("attention.sliding_window_pattern"), file.count("block_count")
    if not isinstance(pattern, list):
        period = pattern or period
        pattern = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern[:layers]]


_SOFT_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
_EXPERT_COUNT = frozenset({"expert_count"})

GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(_llama, neighbours_paired, _EXPERT_COUNT),
    "qwen2": GgufFamily(_plain("Qwen2ForCausalLM")),
    "qwen3": GgufFamily(_plain("Qwen3ForCausalLM")),
    "qwen2moe": GgufFamily(_qwen2moe, reads=_EXPERT_COUNT),
    "qwen3moe": GgufFamily(_qwen3moe, reads=_EXPERT_COUNT),
    "phi3": GgufFamily(_phi3),
    "gemma2": GgufFamily(_gemma2, norms_from_one, _SOFT_CAPS),
    "gemma3": GgufFamily(_gemma3, norms_from_one, _SOFT_CAPS - {"attn_logit_softcapping"}),
    "gpt-oss": GgufFamily(_gpt_oss, gates_and_ups_in_turn, _EXPERT_COUNT),
    "olmo2": GgufFamily(_olmo2),
    "granite": GgufFamily(_granite, neighbours_paired, _SCALES),
    "glm4": GgufFamily(_glm4),
    "smollm3": GgufFamily(_plain("SmolLM3ForCausalLM"), neighbours_paired),
    "ernie4_5": GgufFamily(_plain("Ernie4_5ForCausalLM")),
    "command-r": GgufFamily(_command_r, reads=frozenset({"logit_scale"})),
    "stablelm": GgufFamily(_stablelm),
    "phi2": GgufFamily(_phi2),
    "gptneox": GgufFamily(_gptneox, head_by_head),
    "starcoder2": GgufFamily(_starcoder2),
    "falcon": GgufFamily(_falcon, head_by_head),
    "bloom": GgufFamily(_bloom, head_by_head),
    "gpt2": GgufFamily(_gpt2, transposed),
    "mpt": GgufFamily(_mpt, reads=frozenset({"attention.clamp_kqv", "attention.max_alibi_bias"})),
}
"""By llama.cpp's names of architectures. Each takes over all that changes an answer; the tests compare its logits."""
