"""A model whose decoder layers are of a recognised shape, run whole by the C++ operators instead of module by module.

Knows recognised modules, packed weights and one call for a step. Does not know how the operators compute. The packed
weights take the place of the modules' own, whose memory is given back, so a fused model's modules cannot run any more
until `restore`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_patches.attention import PagedBatch, attending_by, paged_attention_forward, window_of
from model_patches.fused_structure import DecoderModules, LayerModules, NotFusableError, recognise
from model_patches.geometry import RopeGeometry
from model_patches.kernels import build
from model_patches.packed import Joint, Packed
from model_patches.pages import KeyValuePages, PagedTensor
from model_patches.plan import PositionPlan
from model_patches.rotary import FrequencyTable, PlanRotary
from model_patches.schemes.frequencies import geometric_series

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]
"""As `PatchedModel.forward`."""

_PROBE_TOKENS = 6  # torch multiplies bfloat16 slowly where the processor does not know it
# Relative to the norm of the logits, or of a layer's keys or values. Rounding to bfloat16 moves them by up to 0.03;
# what is computed otherwise (a multiplier, a norm elsewhere, keys that are not rotated) moves some by far more.
_AGREEMENT = {torch.bfloat16: 0.1, torch.float32: 1e-4}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionRules:
    """What a layer's own code asks of attention.

    Attributes:
        scale: of the softmax.
        window: how many of the latest tokens are seen; None for all.
    """

    scale: float
    window: int | None


def fuse(
    model: Any, geometry: RopeGeometry, frequencies: FrequencyTable, unfused: Forward, plans_hold_for_all: bool
) -> "FusedDecoder | None":
    """Fuse a patched model if it can be, and compare it with itself unfused.

    One line is logged: that it was fused, or why not.

    Args:
        model: a patched model of transformers. When it is fused, its modules lose their weights.
        geometry: of the model.
        frequencies: of the plans.
        unfused: runs the model's own modules.
        plans_hold_for_all: whether every layer rotates under a token's plan.

    Returns:
        None where there are no C++ operators for the device or number type, the model is not of the shape, or its
        logits came out different; its modules are then as they were.
    """
    try:
        if model.device.type != "cpu" or model.dtype not in _AGREEMENT:
            raise NotFusableError(f"there are no operators for {model.dtype} on {model.device.type}")
        if not plans_hold_for_all:
            raise NotFusableError("some of its layers are not rotated, or have rotary parameters of their own")
        modules = recognise(model)
        if not build.load():
            raise NotFusableError("there are no C++ operators")
        probe = _Probe.of(modules, model.dtype, geometry, frequencies)
        rules, expected = _observe(model, lambda: probe.run(unfused))
    except NotFusableError as reason:
        _log.info("decoder layers run unfused, as transformers has them: %s", reason)
        return None
    decoder = FusedDecoder(modules, rules, PlanRotary(frequencies, columns="pairs"), geometry.layout == "interleaved")
    _leave_the_file(model)
    difference = max(
        float((ours - theirs).norm() / theirs.norm())
        for ours, theirs in zip(probe.run(decoder.forward), expected, strict=True)
    )
    if not difference <= _AGREEMENT[model.dtype]:
        decoder.restore()
        _log.warning(
            "decoder layers run unfused, as transformers has them: fused, numbers are off by %.2g of their norm",
            difference,
        )
        return None
    _log.info("%d decoder layers run fused", len(modules.layers))
    return decoder


def _leave_the_file(model: nn.Module) -> None:
    """Copy what weights there still are: as loaded they lie in the mapped file, and one of them keeps all of it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


class FusedDecoder:
    """Embedding, decoder layers and head of a model, over packed weights.

    Attributes:
        is_deterministic: whether a token's bits depend on nothing but the tokens before it: not on what else is in the
            step, nor on how its sequence was cut into steps.
    """

    def __init__(
        self, modules: DecoderModules, rules: Sequence[AttentionRules], rotary: PlanRotary, interleaved: bool
    ) -> None:
        """Pack the modules' weights and take their own away, one after another, so that no more than one is ever there
        twice.

        Args:
            modules: of the model.
            rules: of each layer's attention.
            rotary: gives one column of cos and sin for each pair.
            interleaved: whether dimensions 2i and 2i + 1 are rotated together, or i and i + d/2.
        """
        self.is_deterministic = False
        self._modules = modules
        self._rotary = rotary
        self._dtype: torch.dtype = modules.head.weight.dtype
        self._tied = modules.embedding.weight is modules.head.weight
        joints = [joint for layer in modules.layers for joint in _joints(layer)]
        head = Joint((modules.head,))
        memory = torch.ops.ropewalk.reserve(sum(joint.bytes for joint in (*joints, head)))
        self._packed: list[Packed] = []
        self._decoder = torch.classes.ropewalk.Decoder(
            modules.hidden,
            modules.heads,
            modules.kv_heads,
            modules.head_dim,
            modules.mlp,
            modules.epsilon,
            interleaved,
            self._dtype == torch.bfloat16,
        )
        for joint in (*joints, head):
            own, memory = memory[: joint.bytes], memory[joint.bytes :]
            self._packed.append(Packed.of(joint, own))
        packed = iter(self._packed)
        for layer, rule in zip(modules.layers, rules, strict=True):
            weights = [part for _ in range(4) for part in next(packed).with_bias()]
            norms = (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)
            self._decoder.add_layer(*map(_gain, norms), *weights, rule.scale, rule.window or 0)
        self._head = next(packed)
        self._decoder.set_head(_gain(modules.norm), *self._head.with_bias(), modules.head.out_features)

    def takes(self, batch: PagedBatch) -> bool:
        """Whether the operators can read and write the batch's pages."""
        return batch.layers[0].keys.dtype in (self._dtype, torch.int8)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan_rows: torch.Tensor,
        logits_at: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """One step, as `PatchedModel.forward`. Angles are made once for all layers, and never rounded below float32;
        the residual stream and the logits are float32, what is multiplied is rounded to the weights' type."""
        cos, sin = self._rotary(self._frequencies_like, torch.stack([positions, plan_rows])[:, None])
        keys, values = [layer.keys for layer in batch.layers], [layer.values for layer in batch.layers]
        groups = batch.groups or (batch,)
        logits: torch.Tensor = self._decoder.forward(
            self._embed(token_ids),
            cos[0],
            sin[0],
            [group.slots for group in groups],
            batch.cu_seq_q,
            batch.seqused_k,
            [group.block_table for group in groups],
            list(batch.group_of) or [0] * len(keys),
            logits_at,
            [pages.data for pages in keys],
            [pages.data for pages in values],
            [pages.scales for pages in keys if pages.scales is not None],
            [pages.scales for pages in values if pages.scales is not None],
            self.is_deterministic,
        )
        return logits

    def restore(self) -> None:
        """Give the modules their weights back, bit for bit; this object is of no use afterwards."""
        for packed in self._packed:
            packed.restore()

    _frequencies_like = torch.empty(0)  # gives the rotary module its number type: float32

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if not self._tied:
            embedded: torch.Tensor = self._modules.embedding(token_ids)
            return embedded
        rows: torch.Tensor = torch.ops.ropewalk.unpack_rows(self._head.weight, token_ids, self._modules.hidden)
        return rows


def _gain(norm: nn.Module | None) -> torch.Tensor | None:
    """A norm's weight, float32, in memory of its own: the operator keeps it, whatever becomes of the module's."""
    return None if norm is None else norm.get_parameter("weight").detach().to(torch.float32, copy=True)


def _joints(layer: LayerModules) -> tuple[Joint, ...]:
    """A layer's products in the order in which it needs them."""
    return Joint(layer.qkv), Joint((layer.output,)), Joint(layer.gate_up, paired=True), Joint((layer.down,))


@dataclass(frozen=True)
class _Probe:
    """A few tokens of one sequence: a step that a fused model must compute as the unfused one does."""

    layers: list[KeyValuePages]
    token_ids: torch.Tensor
    plan_row: int

    @classmethod
    def of(
        cls, modules: DecoderModules, dtype: torch.dtype, geometry: RopeGeometry, frequencies: FrequencyTable
    ) -> "_Probe":
        shape = (1, _PROBE_TOKENS, modules.kv_heads, modules.head_dim)
        layers = [
            KeyValuePages(*(PagedTensor.allocate(shape, dtype, torch.device("cpu")) for _ in range(2)))
            for _ in modules.layers
        ]
        inv_freq = tuple(geometric_series(geometry.theta, geometry.rotary_dim).tolist())
        plan = PositionPlan("default", 1.0, _PROBE_TOKENS, inv_freq, 1.0)
        token_ids = torch.arange(1, _PROBE_TOKENS + 1) * 7919 % modules.embedding.num_embeddings
        return cls(layers, token_ids, frequencies.row(plan))

    def run(self, forward: Forward) -> list[torch.Tensor]:
        """Logits that follow each token, and each layer's keys and values."""
        count = len(self.token_ids)
        places = torch.arange(count)
        lengths = torch.tensor([0, count], dtype=torch.int32)
        batch = PagedBatch(
            layers=self.layers,
            query_lengths=[count],
            key_lengths=[count],
            slots=places,
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            cu_seq_q=lengths,
            cu_seq_k=lengths,
            seqused_k=lengths[1:],
        )
        logits = forward(self.token_ids, places, torch.full_like(places, self.plan_row), places, batch)
        kept = [pages.data.double() for layer in self.layers for pages in (layer.keys, layer.values)]
        return [logits, *kept]


def _observe(model: Any, run: Callable[[], list[torch.Tensor]]) -> tuple[list[AttentionRules], list[torch.Tensor]]:
    """What each layer asks of attention in a run, and what the run returns.

    Raises:
        NotFusableError: it asks for more than a scale and a window.
    """
    seen: dict[int, AttentionRules] = {}

    def observed(module: Any, *tensors: Any, **asked: Any) -> tuple[torch.Tensor, None]:
        if any(asked.get(name) is not None for name in ("s_aux", "softcap")):
            raise NotFusableError("its attention has sinks or a soft cap")
        window = window_of(module, asked.get("sliding_window"))
        seen[module.layer_idx] = AttentionRules(asked["scaling"], window)
        return paged_attention_forward(module, *tensors, **asked)

    with attending_by(model, observed):
        computed = run()
    return [seen[layer] for layer in sorted(seen)], computed
