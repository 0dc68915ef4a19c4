"""What positions a config.json means."""

from typing import Any

import pytest
from transformers import AutoConfig

from model_patches.encoding import FixedEncoding, alibi_slopes, mpt_slopes
from model_patches.encoding_config import read_positions
from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry

# The fields that matter, as the published files have them.
GPT2 = {"model_type": "gpt2", "n_ctx": 1024, "n_positions": 1024, "n_head": 12}
OPT = {"model_type": "opt", "max_position_embeddings": 2048, "hidden_size": 1024, "word_embed_proj_dim": 512}
XGLM = {"model_type": "xglm", "max_position_embeddings": 2048, "d_model": 1024}
BLOOM = {"model_type": "bloom", "n_head": 112, "seq_length": 2048}
MPT = {
    **{
        "model_type": "mpt",
        "n_heads": 32,
        "max_seq_len": 65536,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
    },
    "attn_config": {"alibi": True, "alibi_bias_max": 16, "attn_type": "multihead_attention", "clip_qkv": 6},
}
FALCON = {"model_type": "falcon", "alibi": True, "num_attention_heads": 32, "hidden_size": 2048}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2, FixedEncoding("learned", 1024)),
        (OPT, FixedEncoding("learned", 2048)),
        (XGLM, FixedEncoding("sinusoidal", 2048)),
        (BLOOM, FixedEncoding("alibi", 2048, alibi_slopes(112))),
        (MPT, FixedEncoding("alibi", 65536, mpt_slopes(32, 16))),
    ],
)
def test_published_configs(config: dict[str, Any], expected: FixedEncoding) -> None:
    assert read_positions(config) == expected


def test_falcons_slopes_are_rounded_to_bfloat16_and_scaled_as_logits_are() -> None:
    encoding = read_positions(FALCON)
    assert isinstance(encoding, FixedEncoding)
    assert (encoding.kind, encoding.native_length) == ("alibi", 2048)
    scaled = [slope * 64**0.5 for slope in encoding.slopes]
    assert scaled == pytest.approx(alibi_slopes(32), rel=2**-8)
    assert all((slope * 2**16).is_integer() for slope in scaled)  # 8 bits, the smallest being 2⁻⁸


@pytest.mark.parametrize("alibi", [False, None])
def test_a_falcon_without_alibi_rotates(alibi: bool | None) -> None:
    geometry = read_positions({**FALCON, "alibi": alibi, "rope_theta": 10000.0})
    assert isinstance(geometry, RopeGeometry)
    assert (geometry.rotary_dim, geometry.native_length) == (64, 2048)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "xglm", "bloom", "mpt"])
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    named = {"model_type": model_type, "seq_length": 2048}  # BLOOM's code needs no length
    assert read_positions(named) == read_positions({**config, "seq_length": 2048})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_config": {"alibi": False}}, r"attn_config\.alibi is False; True is supported"),
        ({"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln is True; False is supported"),
        ({"attn_config": {"prefix_lm": True}}, r"attn_config\.prefix_lm is True"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, r"attn_config\.attn_type is 'multiquery_attention'"),
        ({"attn_config": {"alibi_bias_max": 0}}, "alibi_bias_max must be a whole number of at least 1, it is 0"),
        ({"no_bias": False}, "no_bias is False; True is supported"),
        ({"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'; 'low_precision_layernorm' or 'layernorm' is supported"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model'; none is supported"),
        ({"max_seq_len": "2048"}, "max_seq_len must be a whole number of at least 1, it is '2048'"),
        ({"n_heads": True}, "n_heads must be a whole number"),
    ],
)
def test_what_transformers_mpt_would_read_past_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_positions({**MPT, **changes})
