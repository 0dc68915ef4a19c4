"""One transformers model, patched so that one forward pass serves sequences under different plans.

Knows the seams of transformers' models: the rotary module, the attention function by name, keyword arguments that reach
it. Does not know how sequences are scheduled or where their pages come from.
"""

import logging
import time
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from model_patches import attention, fused
from model_patches.attention import PAGED_ATTENTION, PagedBatch
from model_patches.encoding import FixedEncoding, Positions
from model_patches.errors import UnsupportedModelError
from model_patches.fixed_positions import patch_positions
from model_patches.geometry import RopeGeometry
from model_patches.own_attention import OwnAttention, falcon_key_heads, is_own
from model_patches.plan import PositionPlan
from model_patches.recorded import DecodeShape, RecordedDecoding, Recorder
from model_patches.rotary import FrequencyTable, replace_rotary
from model_patches.tensor_parallel import kv_heads_of_one
from model_patches.windows import observe_windows

_log = logging.getLogger(__name__)

_KEEPS_KEYWORDS = frozenset({"stablelm"})
"""Model types whose decoder layers do not hand their keyword arguments on to attention."""


class PatchedModel:
    """A causal language model of transformers with what computes its positions and its attention function replaced.

    Only this object's modules and its own config are changed; other models of the same class are untouched.

    Attributes:
        windows: for each layer, how many of the latest tokens it sees, the token itself included; None for all.
    """

    def __init__(self, model: Any, positions: Positions, *, fuse: bool = True, deterministic: bool = False) -> None:
        """Patch a model in place.

        Args:
            model: a loaded `PreTrainedModel` for causal language modelling, in eval mode.
            positions: its rotary geometry, or what it has instead.
            fuse: whether its decoder layers may be fused, see `model_patches.fused`.
            deterministic: whether a token's bits must depend on nothing but the tokens before it.

        Raises:
            UnsupportedModelError: the model has rotary positions and not exactly one rotary module; or it cannot be
                deterministic.
        """
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.positions = positions
        pairs = positions.rotary_dim // 2 if isinstance(positions, RopeGeometry) else 0
        self._frequencies = FrequencyTable(pairs, model.device)
        attention.register()
        self._own_attention = _own_attention(model, positions)
        self.attend_by(PAGED_ATTENTION)
        self.windows = observe_windows(model)
        if isinstance(positions, FixedEncoding):
            patch_positions(model, positions)
        else:
            replace_rotary(model, self._frequencies, positions)
        if model.config.model_type in _KEEPS_KEYWORDS:
            for layer in model.base_model.layers:
                _HandedOn(layer, layer.self_attn)
        self._recorded: RecordedDecoding | None = None
        self._fused = None
        if fuse and isinstance(positions, RopeGeometry):
            plans_hold_for_all = not self.local_layers
            self._fused = fused.fuse(model, positions, self._frequencies, self._forward_unfused, plans_hold_for_all)
        if self._fused is not None:
            self._fused.is_deterministic = deterministic
        elif deterministic:
            raise UnsupportedModelError("deterministic results need decoder layers that run fused, on a CPU")

    @property
    def geometry(self) -> RopeGeometry:
        """Of a model that rotates; only such models have it."""
        assert isinstance(self.positions, RopeGeometry)
        return self.positions

    @property
    def is_fused(self) -> bool:
        """Whether its decoder layers run fused; then its modules have no weights of their own."""
        return self._fused is not None

    @property
    def records_decoding(self) -> bool:
        """Whether decode steps are replayed."""
        return self._recorded is not None

    @property
    def layers(self) -> int:
        return cast(int, self.model.config.num_hidden_layers)

    @property
    def kv_heads(self) -> int:
        """Heads of the keys, and of the values, in a layer; latent attention is expanded before they are cached.

        Of a model that is split over processes, this one's.
        """
        config, size = self.model.config, self.model.tp_size or 1
        if config.model_type == "falcon":
            return falcon_key_heads(config)
        grouped = None if self._is_latent else getattr(config, "num_key_value_heads", None)
        heads = cast(int, grouped or config.num_attention_heads)
        return heads if size == 1 else cast(int, kv_heads_of_one(self.model.tp_plan, heads, size))

    @property
    def key_dim(self) -> int:
        """Dimensions of a key's head."""
        config = self.model.config
        if self._is_latent:
            return cast(int, config.qk_nope_head_dim + config.qk_rope_head_dim)
        return cast(int, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def value_dim(self) -> int:
        """Dimensions of a value's head."""
        return cast(int, self.model.config.v_head_dim) if self._is_latent else self.key_dim

    @property
    def rotary_offset(self) -> int:
        """The first rotated dimension of a key's head."""
        return cast(int, self.model.config.qk_nope_head_dim) if self._is_latent else 0

    @property
    def local_layers(self) -> frozenset[int]:
        """Layers whose keys plans leave alone: they have rotary parameters of their own, or are not rotated at all."""
        config = self.model.config
        local = self.positions.local if isinstance(self.positions, RopeGeometry) else None
        own = () if local is None else local.layer_types
        types = enumerate(getattr(config, "layer_types", None) or ())
        rotated = enumerate(getattr(config, "no_rope_layers", None) or ())  # by its values, not its name (SmolLM3)
        return frozenset(layer for layer, kind in types if kind in own) | {layer for layer, yes in rotated if not yes}

    @property
    def _is_latent(self) -> bool:
        """Whether the model has DeepSeek's latent attention (MLA)."""
        return getattr(self.model.config, "kv_lora_rank", None) is not None

    def plan_row(self, plan: PositionPlan) -> int:
        """The number that stands for a plan in `forward`; the same plan always gets the same number."""
        return self._frequencies.row(plan)

    def attend_by(self, implementation: str) -> None:
        """Attend by a function that is registered with transformers under this name."""
        if self._own_attention is None:
            self.model.set_attn_implementation(implementation)
        else:
            self._own_attention.use(implementation)

    def record_decoding(self, shape: DecodeShape, record: Recorder) -> None:
        """Have decode steps replayed from now on, if replays come out as the steps do. One line is logged.

        Args:
            shape: of the steps; what its pool holds is overwritten.
            record: on the device of the model.
        """
        start = time.monotonic()
        recorded = RecordedDecoding(self._forward_unfused, self._frequencies, shape, record)
        try:
            recorded.record_all()
        except (UnsupportedModelError, RuntimeError) as reason:
            _log.warning("decode steps are not recorded, which makes them slower: %s", reason)
            return
        self._recorded = recorded
        _log.info("decode steps of up to %d rows recorded in %.1f s", shape.sizes[-1], time.monotonic() - start)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan_rows: torch.Tensor,
        logits_at: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Compute one step: write every token's rotated key and its value into the pages, return logits.

        Args:
            token_ids: int64 [T], the tokens of all sequences, packed.
            positions: int64 [T], each token's position in its own sequence, from 0.
            plan_rows: int64 [T], each token's plan, from `plan_row`.
            logits_at: int64 [R], indices into T of the tokens whose logits are wanted.
            batch: pages and block tables of the step.

        Returns:
            float32 [R, vocabulary]; good until the next step.
        """
        if self._fused is not None and not self._fused.takes(batch):
            self._fused.restore()
            self._fused = None
        run = self._forward_unfused if self._fused is None else self._fused.forward
        if self._recorded is not None and self._recorded.takes(token_ids, logits_at, batch):
            run = self._recorded.forward
        return run(token_ids, positions, plan_rows, logits_at, batch)

    @torch.inference_mode()
    def _forward_unfused(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan_rows: torch.Tensor,
        logits_at: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        return self.run(token_ids, positions, plan_rows, logits_at, paged_batch=batch)

    @torch.inference_mode()
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan_rows: torch.Tensor,
        logits_at: torch.Tensor,
        **keywords: Any,
    ) -> torch.Tensor:
        """Call the model module by module. Args and return value as for `forward`, but for the keyword arguments, which
        the attention function gets."""
        rotates, own = isinstance(self.positions, RopeGeometry), self._own_attention
        with nullcontext() if own is None else own.told(**keywords):
            output = self.model(
                input_ids=token_ids[None],
                position_ids=torch.stack([positions, plan_rows])[:, None] if rotates else positions[None],
                use_cache=False,
                logits_to_keep=logits_at,
                **(keywords if own is None else own.arguments),
            )
        return cast(torch.Tensor, output.logits[0].float())


def _own_attention(model: Any, positions: Positions) -> OwnAttention | None:
    """For a model that attends in code of its own; None for all others."""
    if not is_own(model):
        return None
    slopes = positions.slopes if isinstance(positions, FixedEncoding) else ()
    return OwnAttention(
        model, PAGED_ATTENTION, torch.tensor(slopes, dtype=torch.float32, device=model.device) if slopes else None
    )


class _HandedOn:
    """The keyword arguments of one decoder layer, handed on to its attention beside those that the layer itself passes.

    They are held from the layer's call to that of its attention, no longer.
    """

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        self._taken: dict[str, Any] = {}
        layer.register_forward_pre_hook(self._take, with_kwargs=True)
        attention.register_forward_pre_hook(self._give, with_kwargs=True)

    def _take(self, _layer: nn.Module, _args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._taken = keywords

    def _give(
        self, _attention: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        taken, self._taken = self._taken, {}
        return args, {**taken, **keywords}
