"""A tiny random model of every supported architecture, in the variants that the tests run."""

from collections.abc import Iterator
from typing import Any

from transformers import (
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    Ernie4_5Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    XGLMConfig,
)

from tests.reference import growing

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE: dict[str, Any] = {**growing.SHAPE, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}
WINDOWED, WHOLE = "sliding_attention", "full_attention"
ALTERNATING: dict[str, Any] = {"sliding_window": 20, "layer_types": [WINDOWED, WHOLE, WINDOWED]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TWO_BASES = {
    WHOLE: {"rope_type": "default", "rope_theta": 1e6},
    WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
}
ONE_KEY_HEAD_EACH = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}


def partial(share: float) -> dict[str, Any]:
    """The shape of a model that rotates this share of each head."""
    return {**SHAPE, "rope_parameters": {**ROPE, "partial_rotary_factor": share}}


def scaled(rope_type: str, **options: Any) -> dict[str, Any]:
    """The shape of a model that its config stretches from 64 tokens to 256."""
    rope = {**ROPE, "rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 64, **options}
    return {**SHAPE, "max_position_embeddings": 256, "rope_parameters": rope}


FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, one key head a query head": LlamaConfig(**{**SHAPE, "num_key_value_heads": 6}),
    "llama, head_dim of its own": LlamaConfig(**SHAPE, head_dim=16),
    "mistral, no window": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window of 20": MistralConfig(**SHAPE, sliding_window=20),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "ministral, windows in some layers": MinistralConfig(**SHAPE, **ALTERNATING, head_dim=8),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=32),
    "qwen2-moe, windows in some layers": Qwen2MoeConfig(
        **SHAPE, **EXPERTS, **ALTERNATING, shared_expert_intermediate_size=32, use_sliding_window=True
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-moe, one layer without experts": Qwen3MoeConfig(**{**SHAPE, "head_dim": 16}, **EXPERTS, mlp_only_layers=[1]),
    "phi, half of each head": PhiConfig(**partial(0.5)),
    "phi, norms of queries and keys": PhiConfig(**partial(0.5), qk_layernorm=True),
    "phi3": Phi3Config(**SHAPE),
    "phi3, half of each head": Phi3Config(**partial(0.5)),
    "gemma2, soft caps, windows in some layers": Gemma2Config(
        **SHAPE,
        **ALTERNATING,
        head_dim=8,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3, windows with a base of their own": Gemma3TextConfig(
        **{**SHAPE, "rope_parameters": TWO_BASES}, **ALTERNATING, head_dim=16
    ),
    "glm, half of each head": GlmConfig(**partial(0.5), head_dim=16),
    "glm4": Glm4Config(**partial(1.0), head_dim=8),
    "glm4, half of each head": Glm4Config(**partial(0.5), head_dim=16),
    "gpt-neox, half of each head": GPTNeoXConfig(
        **{**ONE_KEY_HEAD_EACH, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
    ),
    "gpt-neox, one branch after the other": GPTNeoXConfig(
        **{**ONE_KEY_HEAD_EACH, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        use_parallel_residual=False,
    ),
    "olmo2": Olmo2Config(**SHAPE),
    "olmo3, windows never scaled": Olmo3Config(**{**SHAPE, "rope_parameters": TWO_BASES}, **ALTERNATING),
    "granite": GraniteConfig(
        **SHAPE, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "stablelm, half of each head": StableLmConfig(**partial(0.5)),
    "stablelm, norms of queries and keys": StableLmConfig(
        **partial(0.5), qk_layernorm=True, use_parallel_residual=True
    ),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.5),
    "cohere, norms of queries and keys": CohereConfig(**SHAPE, use_qk_norm=True, logit_scale=2.0),
    "helium": HeliumConfig(**SHAPE, head_dim=8),
    "ernie4.5": Ernie4_5Config(**SHAPE, head_dim=8),
    "smollm3, one layer not rotated": SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1]),
    "starcoder2, window of 20": Starcoder2Config(**SHAPE, sliding_window=20),
    "falcon, one key head": FalconConfig(**SHAPE),
    "falcon, one branch after the other": FalconConfig(**SHAPE, multi_query=False, parallel_attn=False, bias=True),
    "falcon, new decoder architecture": FalconConfig(**SHAPE, new_decoder_architecture=True, num_kv_heads=2),
}
"""Models without scaling, by what is special about them."""

TABLES = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 4.5]}
SINKS: dict[str, Any] = {"head_dim": 16, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "first_k_dense_replace": 1},
}
SCALED: dict[str, Any] = {
    "llama, llama3": LlamaConfig(**scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, linear": LlamaConfig(**{**scaled("linear"), "max_position_embeddings": 64}),
    "llama, yarn with mscale": LlamaConfig(**scaled("yarn", mscale=1.0, mscale_all_dim=0.7)),
    "mistral, yarn, window of 20": MistralConfig(**scaled("yarn"), sliding_window=20),
    "qwen2, yarn": Qwen2Config(**scaled("yarn")),
    "qwen3, yarn": Qwen3Config(**scaled("yarn"), head_dim=16),
    "phi3, longrope": Phi3Config(**scaled("longrope", **TABLES), original_max_position_embeddings=64),
    "glm4, yarn, half of each head": Glm4Config(**scaled("yarn", partial_rotary_factor=0.5), head_dim=16),
    "cohere, yarn": CohereConfig(**scaled("yarn")),
    "gpt-oss, yarn without truncation": GptOssConfig(**{**scaled("yarn", truncate=False), **SINKS}),
    "deepseek-v3, yarn with mscale": DeepseekV3Config(**{**scaled("yarn", mscale=1.0, mscale_all_dim=1.0), **LATENT}),
}
"""Models with scaling of their own."""

NAMES: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2: dict[str, Any] = {**NAMES, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
OPT: dict[str, Any] = {
    **NAMES,
    **{"hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 6},
    "max_position_embeddings": 256,
}
XGLM: dict[str, Any] = {**NAMES, "d_model": 48, "ffn_dim": 64, "num_layers": 3, "attention_heads": 6}
BLOOM: dict[str, Any] = {**NAMES, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": 64}
MPT: dict[str, Any] = {**NAMES, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64}
# As many heads as make slopes that bfloat16 has, and up to 256 tokens: elsewhere Falcon's own code rounds biases.
FALCON: dict[str, Any] = {
    **{**NAMES, "alibi": True, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8},
    "max_position_embeddings": 64,
}
FIXED: dict[str, Any] = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2, scaled by layer": GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt2, no scale": GPT2Config(**GPT2, scale_attn_weights=False, reorder_and_upcast_attn=True),
    "opt": OPTConfig(**OPT),
    "opt, narrow embeddings, norms after": OPTConfig(**OPT, word_embed_proj_dim=24, do_layer_norm_before=False),
    "xglm": XGLMConfig(**XGLM, max_position_embeddings=64),
    "xglm, odd embeddings, a padding position": XGLMConfig(
        **{**XGLM, "d_model": 45, "attention_heads": 5, "pad_token_id": 9}, max_position_embeddings=64
    ),
    "bloom, 6 heads": BloomConfig(**BLOOM),
    "bloom, 8 heads, residual after norm": BloomConfig(
        **{**BLOOM, "n_head": 8}, apply_residual_connection_post_layernorm=True
    ),
    "mpt, 6 heads": MptConfig(**MPT),
    "mpt, 8 heads, clipped": MptConfig(**{**MPT, "n_heads": 8}, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.2}),
    "falcon, ALiBi": FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon, ALiBi, one key head, two branches": FalconConfig(**FALCON),
}
"""Models that rotate nothing: learned, sinusoidal and ALiBi."""


def configs() -> Iterator[Any]:
    """Of all of them."""
    yield from FIXED.values()
    yield from FAMILIES.values()
    yield from SCALED.values()
