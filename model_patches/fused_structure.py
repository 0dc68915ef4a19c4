"""Which of a model's modules do what in a decoder layer, told from how they are put together and how they behave.

Knows the one shape of a layer that the C++ operators run: RMSNorm, joined or separate query, key and value products, an
optional norm over each head of queries and keys, attention, output product, RMSNorm, SiLU-gated product, down product.
Does not know any model's name, nor what the model's own code does between the modules: that is compared when a model is
fused.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_JOINED_QKV, _SEPARATE_QKV = ("qkv_proj",), ("q_proj", "k_proj", "v_proj")
_JOINED_MLP, _SEPARATE_MLP = ("gate_up_proj",), ("gate_proj", "up_proj")


class NotFusableError(Exception):
    """A model is not of the shape; the message says in one line what differs."""


@dataclass(frozen=True)
class LayerModules:
    """The modules of one decoder layer.

    Attributes:
        attention_norm: before attention.
        query_norm: over each head of the queries, or None.
        key_norm: likewise of the keys.
        qkv: one joined product, or those of queries, keys and values.
        output: from the heads back to the hidden states.
        mlp_norm: before the MLP.
        gate_up: one joined product, or those of gate and up.
        down: from the MLP back to the hidden states.
        head_dim: of queries, keys and values.
    """

    attention_norm: nn.Module
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    qkv: tuple[nn.Linear, ...]
    output: nn.Linear
    mlp_norm: nn.Module
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    head_dim: int


@dataclass(frozen=True)
class DecoderModules:
    """The modules of a causal language model.

    Attributes:
        embedding: token ids → hidden states.
        layers: in order.
        norm: after the last layer.
        head: hidden states → logits; its weights may be the embedding's.
        epsilon: of all norms.
        hidden: size of a hidden state.
        heads: of queries.
        kv_heads: of keys and of values.
        head_dim: of all of them.
        mlp: columns of gate, and of up.
    """

    embedding: nn.Embedding
    layers: tuple[LayerModules, ...]
    norm: nn.Module
    head: nn.Linear
    epsilon: float
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


def recognise(model: Any) -> DecoderModules:
    """Find the modules of a causal language model of transformers.

    Raises:
        NotFusableError: it has other modules or parameters, other sizes, or modules that behave otherwise.
    """
    base, head = model.base_model, model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise NotFusableError("its embedding or its head is of another kind")
    _expect(base, {"embed_tokens", "layers", "norm", "rotary_emb"}, "the model")
    layers = tuple(_layer(layer) for layer in base.layers)
    norms = [base.norm, *(norm for layer in layers for norm in _norms(layer))]
    epsilons = {_rms_norm_epsilon(norm) for norm in norms}
    if len(epsilons) != 1:
        raise NotFusableError("its norms have different epsilons")
    modules = DecoderModules(
        embedding, layers, base.norm, head, epsilons.pop(), embedding.embedding_dim, *_sizes(layers)
    )
    _check_parameters(model, modules)
    return modules


def _layer(layer: nn.Module) -> LayerModules:
    _expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, "a layer")
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    qkv = _projections(attention, _JOINED_QKV, _SEPARATE_QKV)
    gate_up = _projections(mlp, _JOINED_MLP, _SEPARATE_MLP)
    norms = {"q_norm", "k_norm"} & {name for name, _ in attention.named_children()}
    _expect(attention, {*qkv, "o_proj", *norms}, "attention")
    if norms and len(norms) != 2:
        raise NotFusableError("attention normalises queries or keys alone")
    activations = {name for name, module in mlp.named_children() if not isinstance(module, nn.Linear)}
    _expect(mlp, {*gate_up, "down_proj", *activations}, "the MLP")
    if len(activations) != 1 or not _is_silu(mlp.get_submodule(activations.pop())):
        raise NotFusableError("the MLP's activation is not SiLU")
    return LayerModules(
        attention_norm=layer.get_submodule("input_layernorm"),
        query_norm=attention.get_submodule("q_norm") if norms else None,
        key_norm=attention.get_submodule("k_norm") if norms else None,
        qkv=tuple(_linear(attention, name) for name in qkv),
        output=_linear(attention, "o_proj"),
        mlp_norm=layer.get_submodule("post_attention_layernorm"),
        gate_up=tuple(_linear(mlp, name) for name in gate_up),
        down=_linear(mlp, "down_proj"),
        head_dim=int(getattr(attention, "head_dim", 0)),
    )


def _expect(module: nn.Module, names: set[str], what: str) -> None:
    """Refuse a module with other children; a dropout does nothing in eval mode."""
    found = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    if found != names:
        raise NotFusableError(f"{what} is made of {', '.join(sorted(found)) or 'nothing'}")


def _projections(module: nn.Module, joined: tuple[str, ...], separate: tuple[str, ...]) -> tuple[str, ...]:
    return joined if hasattr(module, joined[0]) else separate


def _linear(module: nn.Module, name: str) -> nn.Linear:
    child = module.get_submodule(name)
    if type(child) is not nn.Linear:
        raise NotFusableError(f"{name} is a {type(child).__name__}")
    return child


def _norms(layer: LayerModules) -> list[nn.Module]:
    norms = (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)
    return [norm for norm in norms if norm is not None]


@torch.no_grad()
def _rms_norm_epsilon(norm: nn.Module) -> float:
    """The epsilon of a module that behaves as RMSNorm (1910.07467, eq. 4) with its weight as the gain."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(epsilon, float) or weight.dim() != 1:
        raise NotFusableError(f"{type(norm).__name__} is not an RMSNorm")
    x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
    by_definition = x.double() / (x.double().square().mean() + epsilon).sqrt() * weight.double()
    if not torch.allclose(norm(x).double(), by_definition, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6):
        raise NotFusableError(f"{type(norm).__name__} is not an RMSNorm")
    return epsilon


def _is_silu(activation: nn.Module) -> bool:
    x = torch.linspace(-6, 6, 25)
    return torch.allclose(activation(x), x / (1 + (-x).exp()), rtol=1e-5, atol=1e-6)


def _sizes(layers: tuple[LayerModules, ...]) -> tuple[int, int, int, int]:
    """heads, kv_heads, head_dim and MLP columns, alike in all layers."""
    sizes = {_sizes_of(layer) for layer in layers}
    if len(sizes) != 1:
        raise NotFusableError("its layers are of different sizes")
    return sizes.pop()


def _sizes_of(layer: LayerModules) -> tuple[int, int, int, int]:
    dim, attended = layer.head_dim, layer.output.in_features
    key_columns, odd = divmod(sum(linear.out_features for linear in layer.qkv) - attended, 2)
    if not dim or odd or attended % dim or key_columns % dim or key_columns <= 0:
        raise NotFusableError("queries, keys and values are not whole heads of one size")
    if len(layer.qkv) == 3 and [linear.out_features for linear in layer.qkv[1:]] != [key_columns, key_columns]:
        raise NotFusableError("keys and values are of different sizes")
    head_norms = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    if any(norm.get_parameter("weight").numel() != dim for norm in head_norms):
        raise NotFusableError("norms of queries and keys are not over single heads")
    return attended // dim, key_columns // dim, dim, layer.down.in_features


def _check_parameters(model: nn.Module, modules: DecoderModules) -> None:
    """Refuse a model with parameters that no recognised module has, a layer's attention sinks for instance."""
    known: set[int] = set()
    for layer in modules.layers:
        for module in (*_norms(layer), *layer.qkv, layer.output, *layer.gate_up, layer.down):
            known |= {id(parameter) for parameter in module.parameters()}
    for module in (modules.embedding, modules.norm, modules.head):
        known |= {id(parameter) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise NotFusableError(f"it has a parameter {name}")
