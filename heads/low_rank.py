"""Low-rank deltas beside the linear layers of a decoder layer whose own weights are shared and never change.

Not peft's LoRA layers: those hold the layer that they stand in for, so that a head would carry the base's weights in
its state, and their place would be in the base's own tree. Here the deltas are all that a head owns.

R rank; D_in input size; D_out output size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from .stand_in import is_stand_in


class LowRankDelta(nn.Module):
    """`hidden @ down.T @ up.T`, zero at first."""

    def __init__(self, in_size: int, out_size: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, in_size, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.zeros(out_size, rank, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        """What is added to the linear layer's output."""
        return F.linear(F.linear(hidden, self.down), self.up)


class WithDelta:
    """A linear layer, in whatever form it is called, plus its delta."""

    def __init__(self, linear: Callable[[Tensor], Tensor], delta: LowRankDelta) -> None:
        self.linear = linear
        self.delta = delta

    def __call__(self, hidden: Tensor) -> Tensor:  # [..., T, D_in] -> [..., T, D_out]
        return self.linear(hidden) + self.delta(hidden)


def new_deltas(layer: nn.Module, rank: int, dtype: torch.dtype, device: torch.device) -> nn.ModuleDict:
    """One delta for each linear layer in `layer`, by its path with `/` in place of the dots."""
    return nn.ModuleDict(
        {path: LowRankDelta(*_sizes(linear), rank, dtype, device) for path, linear in _linears(layer, "")}
    )


def add_deltas(layer: Any, deltas: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """`layer`, a tree of its own, with the deltas added in it: in place, without a tensor of theirs in the tree."""
    for name, child in [*layer._modules.items(), *vars(layer).items()]:
        if f"{path}{name}" in deltas:
            delta = deltas[f"{path}{name}"]
            assert isinstance(delta, LowRankDelta)
            layer._modules.pop(name, None)
            layer.__dict__[name] = WithDelta(child, delta)
        elif isinstance(child, nn.Module) and not is_stand_in(child):
            add_deltas(child, deltas, f"{path}{name}/")
    assert isinstance(layer, nn.Module)
    return layer


def _linears(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear | Conv1D) or (hasattr(child, "in_features") and hasattr(child, "out_features")):
            yield f"{path}{name}", child
        elif not is_stand_in(child):
            yield from _linears(child, f"{path}{name}/")


def _sizes(linear: Any) -> tuple[int, int]:  # D_in, D_out
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf
    return linear.in_features, linear.out_features
