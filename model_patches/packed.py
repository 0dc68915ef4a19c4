"""Weights in the panels that the C++ products read, in place of the modules' own.

Knows linear modules and the panels' layout (model_patches/kernels/linear_kernels.h). Does not know which products a
model has.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad

_PANEL_COLUMNS, _DEPTH_STEP = 32, 32  # of model_patches/kernels/linear_kernels.h


@dataclass(frozen=True)
class Joint:
    """Products of the same input that become one.

    Attributes:
        linears: one after another, each one's columns after those of the one before.
        paired: panels of the first and of the second half of all columns alternate.
    """

    linears: tuple[nn.Linear, ...]
    paired: bool = False

    @property
    def outputs(self) -> int:
        return sum(len(linear.weight) for linear in self.linears)

    @property
    def inputs(self) -> int:
        return self.linears[0].weight.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the packed weight: panel groups, panels in each, elements of a panel."""
        span = 2 if self.paired else 1
        depth = -(-self.inputs // _DEPTH_STEP) * _DEPTH_STEP
        return -(-self.outputs // span // _PANEL_COLUMNS), span, depth * _PANEL_COLUMNS

    @property
    def bytes(self) -> int:
        groups, span, elements = self.shape
        return groups * span * elements * self.linears[0].weight.element_size()


@dataclass(frozen=True)
class Packed:
    """A joint whose weights are in panels, and in its modules no more.

    Attributes:
        joint: where they came from.
        shapes: of the modules' weights.
        weight: [panels, elements of a panel].
    """

    joint: Joint
    shapes: tuple[torch.Size, ...]
    weight: torch.Tensor

    @classmethod
    def of(cls, joint: Joint, memory: torch.Tensor) -> "Packed":
        """Pack into uint8 memory of just the right size."""
        weights = [linear.weight.data for linear in joint.linears]
        panels = memory.view(weights[0].dtype).view(joint.shape)
        span = panels.shape[1]
        parts = weights if len(weights) == span else torch.cat(weights).chunk(span)
        for number, part in enumerate(parts):
            torch.ops.ropewalk.pack(part, panels[:, number])
        shapes = tuple(weight.shape for weight in weights)
        for linear in joint.linears:
            linear.weight.data = linear.weight.data.new_empty(0)
        return cls(joint, shapes, panels.flatten(0, 1))

    def with_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight, and the bias in the order of its panels: float32, zeros where columns are padded."""
        linears = self.joint.linears
        if all(linear.bias is None for linear in linears):
            return self.weight, None
        biases = [
            linear.weight.new_zeros(shape[0]) if linear.bias is None else linear.bias.data
            for linear, shape in zip(linears, self.shapes, strict=True)
        ]
        span = 2 if self.joint.paired else 1
        parts = torch.cat(biases).float().view(span, -1)
        padded = pad(parts, (0, -parts.shape[1] % _PANEL_COLUMNS))
        return self.weight, padded.view(span, -1, _PANEL_COLUMNS).transpose(0, 1).flatten()

    def restore(self) -> None:
        span = 2 if self.joint.paired else 1
        outputs, inputs = sum(shape[0] for shape in self.shapes), self.shapes[0][1]
        rows = torch.arange(outputs // span)
        panels = self.weight.view(-1, span, self.weight.shape[1])
        parts = [torch.ops.ropewalk.unpack_rows(panels[:, number], rows, inputs) for number in range(span)]
        weights = torch.cat(parts).split([shape[0] for shape in self.shapes])
        for linear, weight in zip(self.joint.linears, weights, strict=True):
            linear.weight.data = weight.clone()
