"""Every family of GGUF files becomes the model that its file was made from."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.convert import convert_gguf
from model_patches.loading.gguf_families import GGUF_FAMILIES, gguf_family
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.load import load_model

TinyGguf = Callable[..., Path]
CPU = torch.device("cpu")
VOCABULARY, HIDDEN, INNER, HEADS, LENGTH = 265, 32, 48, 4, 128
THETA = 30_000.0
TOKENS = torch.arange(100)[None] * 7 % VOCABULARY  # longer than the windows and original lengths below

PLAIN = {"rope_type": "default", "rope_theta": THETA}
FIXED = {"rope_type": "default", "rope_theta": 10_000.0}  # of families whose files do not say it
HALF = {"partial_rotary_factor": 0.5}
ROTARY: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": LENGTH},
    **{"rope_parameters": PLAIN, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
OLD: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
WIDE = {"attention.key_length": 16, "attention.value_length": 16}
ROTATED = {"rope.freq_base": THETA}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
LOCAL = {"rope_type": "default", "rope_theta": 20_000.0}
WINDOW = {"attention.sliding_window": 16}

Case = tuple[str, str, Mapping[str, Any], Mapping[str, Any]]
"""Architecture, transformers' config class, what it is made with, and the keys that the file has beside its size."""

CASES: dict[str, Case] = {
    "llama": ("llama", "LlamaConfig", ROTARY, ROTATED | {"rope.dimension_count": 8}),
    "llama with biases": ("llama", "LlamaConfig", ROTARY | {"attention_bias": True, "mlp_bias": True}, ROTATED),
    "llama, linear": (
        "llama",
        "LlamaConfig",
        ROTARY | {"rope_parameters": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}},
        ROTATED | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "mixtral": (
        "llama",
        "MixtralConfig",
        ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        ROTATED | {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2, tied": ("qwen2", "Qwen2Config", ROTARY | {"tie_word_embeddings": True}, ROTATED),
    "qwen2, yarn": (
        "qwen2",
        "Qwen2Config",
        ROTARY | {"rope_parameters": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3}},
        ROTATED
        | YARN_KEYS
        | {"rope.scaling.yarn_beta_fast": 20.0, "rope.scaling.yarn_beta_slow": 2.0}
        | {"rope.scaling.yarn_attn_factor": 1.3},
    ),
    "qwen3": ("qwen3", "Qwen3Config", ROTARY | {"head_dim": 16}, ROTATED | WIDE),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeConfig",
        ROTARY | EXPERTS | {"shared_expert_intermediate_size": 40},
        ROTATED | EXPERT_KEYS | {"expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeConfig",
        ROTARY | EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
        ROTATED | EXPERT_KEYS | WIDE,
    ),
    "phi3": (
        "phi3",
        "Phi3Config",
        ROTARY | {"sliding_window": 16},
        ROTATED | WINDOW | {"rope.dimension_count": 8, "rope.scaling.original_context_length": 4096},
    ),
    "phi-4": ("phi3", "Phi3Config", ROTARY | {"sliding_window": None}, ROTATED | {"attention.sliding_window": 0}),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        ROTARY
        | {"num_hidden_layers": 3, "rope_parameters": FIXED, "head_dim": 16, "sliding_window": 16}
        | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        WIDE | WINDOW | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        ROTARY
        | {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
        | {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": FIXED}},
        ROTATED | WIDE | WINDOW,
    ),
    "gemma3, linear, capped": (
        "gemma3",
        "Gemma3TextConfig",
        ROTARY
        | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": 2.0, "sliding_window_pattern": 2}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA},
                "sliding_attention": LOCAL,
            }
        },
        ROTATED
        | WIDE
        | WINDOW
        | {"rope.freq_base_swa": 20_000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
        | {"final_logit_softcapping": 2.0, "attention.sliding_window_pattern": 2},
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOssConfig",
        ROTARY
        | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
        | {"rope_parameters": YARN | {"beta_fast": 1.0, "beta_slow": 0.1, "truncate": False}},
        ROTATED
        | EXPERT_KEYS
        | YARN_KEYS
        | WINDOW
        | WIDE
        | {"expert_feed_forward_length": INNER, "rope.scaling.yarn_beta_fast": 1.0, "rope.scaling.yarn_beta_slow": 0.1},
    ),
    "olmo2": ("olmo2", "Olmo2Config", ROTARY, ROTATED),
    "olmo3": (
        "olmo2",
        "Olmo3Config",
        ROTARY
        | {"num_hidden_layers": 3, "sliding_window": 16}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
        ROTATED | YARN_KEYS | WINDOW | {"attention.sliding_window_pattern": [False, True, False]},
    ),
    "granite": (
        "granite",
        "GraniteConfig",
        ROTARY
        | {"embedding_multiplier": 2.0, "attention_multiplier": 0.1}
        | {"residual_multiplier": 0.5, "logits_scaling": 3.0},
        ROTATED | {"embedding_scale": 2.0, "attention.scale": 0.1, "residual_scale": 0.5, "logit_scale": 3.0},
    ),
    "glm4": (
        "glm4",
        "Glm4Config",
        ROTARY | {"head_dim": 16, "attention_bias": True, "rope_parameters": PLAIN | HALF},
        ROTATED | WIDE | {"rope.dimension_count": 8},
    ),
    "smollm3": ("smollm3", "SmolLM3Config", ROTARY | {"num_hidden_layers": 4}, ROTATED),
    "ernie4_5": ("ernie4_5", "Ernie4_5Config", ROTARY | {"head_dim": 16}, ROTATED | WIDE),
    "command-r": ("command-r", "CohereConfig", ROTARY | {"logit_scale": 0.5}, ROTATED | {"logit_scale": 0.5}),
    "command-r+": (
        "command-r",
        "CohereConfig",
        ROTARY | {"logit_scale": 0.5, "use_qk_norm": True},
        ROTATED | {"logit_scale": 0.5},
    ),
    "stablelm": (
        "stablelm",
        "StableLmConfig",
        ROTARY | {"rope_parameters": FIXED | HALF, "use_qkv_bias": True},
        {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "stablelm, parallel": (
        "stablelm",
        "StableLmConfig",
        ROTARY | {"rope_parameters": FIXED | HALF, "use_parallel_residual": True},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "phi2": (
        "phi2",
        "PhiConfig",
        ROTARY | {"num_key_value_heads": HEADS, "rope_parameters": FIXED | HALF},
        {"rope.dimension_count": 4},
    ),
    "gptneox": (
        "gptneox",
        "GPTNeoXConfig",
        ROTARY | {"rope_parameters": FIXED | HALF},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "gptneox, sequential": (
        "gptneox",
        "GPTNeoXConfig",
        ROTARY | {"rope_parameters": FIXED | {"partial_rotary_factor": 1.0}, "use_parallel_residual": False},
        {"rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "starcoder2": ("starcoder2", "Starcoder2Config", ROTARY | {"sliding_window": 16}, ROTATED | WINDOW),
    "falcon-7b": (
        "falcon",
        "FalconConfig",
        OLD | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS},
        {"attention.head_count_kv": 1},
    ),
    "falcon-40b": (
        "falcon",
        "FalconConfig",
        OLD
        | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS}
        | {"num_kv_heads": 2, "new_decoder_architecture": True},
        {"attention.head_count_kv": 2},
    ),
    "falcon-11b": (
        "falcon",
        "FalconConfig",
        OLD
        | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_kv_heads": 2}
        | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
        {"attention.head_count_kv": 2},
    ),
    "bloom": ("bloom", "BloomConfig", OLD | {"hidden_size": HIDDEN, "n_layer": 2, "n_head": HEADS}, {}),
    "gpt2": (
        "gpt2",
        "GPT2Config",
        OLD | {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": LENGTH},
        {"attention.head_count_kv": None},
    ),
    "mpt": (
        "mpt",
        "MptConfig",
        OLD | {"d_model": HIDDEN, "n_layers": 2, "n_heads": HEADS, "max_seq_len": LENGTH},
        {"attention.max_alibi_bias": 8.0},
    ),
    "mpt, clipped": (
        "mpt",
        "MptConfig",
        OLD
        | {"d_model": HIDDEN, "n_layers": 2, "n_heads": HEADS, "max_seq_len": LENGTH}
        | {"attn_config": {"clip_qkv": 0.5}},
        {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.5},
    ),
}


LONGROPE: Case = (
    "phi3",
    "Phi3Config",
    ROTARY
    | {"original_max_position_embeddings": 32, "sliding_window": None}
    | {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": THETA, "partial_rotary_factor": 0.75},
            **{"original_max_position_embeddings": 32, "attention_factor": 1.5},
            **{"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0]},
        },
    },
    ROTATED
    | {"rope.dimension_count": 6, "rope.scaling.original_context_length": 32}
    | {"rope.scaling.attn_factor": 1.5},
)
EPSILON = 1e-3
EPSILONS = {
    **{"rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon"},
    **{"layer_norm_epsilon": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon"},
}


def _model(case: Case) -> PreTrainedModel:
    """Random weights that bfloat16 holds, and an epsilon that no class has by default."""
    _, config_class, fields, _ = case
    config: PreTrainedConfig = getattr(transformers, config_class)(**_copied(fields))
    for name in EPSILONS:
        if hasattr(config, name):
            setattr(config, name, EPSILON)
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).mul(0.2).bfloat16().float()
    return model


def _copied(value: Any) -> Any:
    """Config classes write into the dicts that they are given."""
    return {name: _copied(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _keys(case: Case, model: PreTrainedModel) -> dict[str, Any]:
    """What the file says, its size included; nothing that the fixture's own Llama says goes on."""
    architecture, _, fields, keys = case
    whole: dict[str, Any] = {
        **{"rope.freq_base": None, "rope.dimension_count": None, "vocab_size": None},
        **{"attention.layer_norm_rms_epsilon": None},
        "block_count": model.config.num_hidden_layers,
        "attention.head_count_kv": fields.get("num_key_value_heads"),
        "feed_forward_length": fields.get("intermediate_size", 4 * HIDDEN),
        **{key: EPSILON for name, key in EPSILONS.items() if hasattr(model.config, name)},
        **keys,
    }
    return {f"{architecture}.{key}": value for key, value in whole.items()}


def _assert_same(folder: Path, model: PreTrainedModel, tokens: torch.Tensor) -> None:
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    assert loaded.config["architectures"] == [type(model).__name__] == [type(loaded.model).__name__]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_every_family_has_a_case() -> None:
    assert {architecture for architecture, *_ in CASES.values()} == set(GGUF_FAMILIES)


def test_the_readme_names_every_family() -> None:
    sentence = (
        Path("README.md").read_text(encoding="utf-8").split("architectures llama", 1)[1].split("in one file", 1)[0]
    )
    assert set(re.findall(r"[\w-]+", f"llama{sentence}")) >= set(GGUF_FAMILIES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_file_becomes_the_model_that_it_was_made_from(tiny_gguf: TinyGguf, tmp_path: Path, case: Case) -> None:
    model = _model(case)
    convert_gguf(tiny_gguf(architecture=case[0], model=model, metadata=_keys(case, model)), tmp_path)
    _assert_same(tmp_path, model, TOKENS)


@pytest.mark.parametrize("length", [20, 100])
def test_longrope_is_read_with_both_tables(tiny_gguf: TinyGguf, tmp_path: Path, length: int) -> None:
    model = _model(LONGROPE)
    tables = {"long": [1.0, 2.0, 3.0], "short": [1.0, 1.1, 1.2]}
    tensors = {f"rope_factors_{name}.weight": np.array(table, np.float32) for name, table in tables.items()}
    convert_gguf(
        tiny_gguf(architecture="phi3", model=model, metadata=_keys(LONGROPE, model), tensors=tensors), tmp_path
    )
    _assert_same(tmp_path, model, TOKENS[:, :length])


@pytest.mark.parametrize(("layers", "scale"), [(62, 8), (3, 16)])
def test_queries_of_the_largest_gemma_are_scaled_by_another_width(tiny_gguf: TinyGguf, layers: int, scale: int) -> None:
    model = _model(CASES["gemma3"])
    metadata = _keys(CASES["gemma3"], model) | {"gemma3.block_count": layers}
    file = GgufFile([tiny_gguf(architecture="gemma3", model=model, metadata=metadata)])
    assert gguf_family(file).config(file)["query_pre_attn_scalar"] == scale


def test_a_window_that_files_do_not_state_is_the_one_that_all_its_models_have(tiny_gguf: TinyGguf) -> None:
    model = _model(CASES["starcoder2"])
    metadata = _keys(CASES["starcoder2"], model) | {"starcoder2.attention.sliding_window": None}
    file = GgufFile([tiny_gguf(architecture="starcoder2", model=model, metadata=metadata)])
    assert gguf_family(file).config(file)["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("key", "value"),
    [("logit_scale", 0.5), ("attention.scale", 0.1), ("expert_count", 8), ("final_logit_softcapping", 30.0)],
)
def test_what_its_family_does_not_read_is_refused_by_name(
    tiny_gguf: TinyGguf, tmp_path: Path, key: str, value: float
) -> None:
    path = tiny_gguf(architecture="qwen2", metadata={f"qwen2.{key}": value})
    with pytest.raises(UnsupportedModelError, match=rf"qwen2\.{key} {value}"):
        convert_gguf(path, tmp_path)


def test_the_same_keys_at_values_that_do_nothing_are_no_matter(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    neutral = {"logit_scale": 1.0, "expert_count": 0, "attention.causal": True}
    convert_gguf(tiny_gguf(metadata={f"llama.{key}": value for key, value in neutral.items()}), tmp_path)


def test_a_tensor_without_a_place_is_refused_by_name(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tiny_gguf(tensors={"blk.0.attn_q.bias": np.zeros(32, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"no place here: blk\.0\.attn_q\.bias \(1 in all\)"):
        convert_gguf(path, tmp_path)


def test_a_weight_under_another_name_is_not_called_damage(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    fused = {"blk.0.attn_qkv.weight": np.zeros((64, 32), np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"no place here: blk\.0\.attn_qkv\.weight"):
        convert_gguf(tiny_gguf(tensors=fused, without="blk.0.attn_q.weight"), tmp_path)


def test_a_count_of_its_own_for_each_layer_is_refused(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.head_count_kv for some layers"):
        convert_gguf(tiny_gguf(metadata={"llama.attention.head_count_kv": [2, 4]}), tmp_path)


def test_a_weight_that_cannot_be_put_into_order_is_called_damaged(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(DamagedModelError, match=r"blk\.0\.attn_q\.weight of .* cannot be model\.layers\.0\.self_attn"):
        convert_gguf(tiny_gguf(tensors={"blk.0.attn_q.weight": np.zeros((30, 31), np.float32)}), tmp_path)


def test_sizes_that_make_no_model_are_called_damaged(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    case = CASES["gpt2"]
    model = _model(case)
    metadata = _keys(case, model) | {"gpt2.attention.head_count": 5}
    with pytest.raises(DamagedModelError, match=r"does not describe a model of its architecture: .*divisible"):
        convert_gguf(tiny_gguf(architecture="gpt2", model=model, metadata=metadata), tmp_path)


def test_a_weight_of_another_shape_is_called_damaged(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    with pytest.raises(DamagedModelError, match=r"blk\.0\.ffn_up\.weight gives \[40, 32\] .*expected \[48, 32\]"):
        convert_gguf(tiny_gguf(tensors={"blk.0.ffn_up.weight": np.zeros((40, 32), np.float32)}), tmp_path)
