"""Optimizers of the heads, all of torch: what an update makes of the gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..heads import EarlyExitModel


def adamw(model: EarlyExitModel, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the heads; only matrices decay. The learning rate is set at every step."""
    return _adamw(list(model.heads.parameters()), weight_decay)


def _adamw(parameters: Sequence[nn.Parameter], weight_decay: float) -> torch.optim.AdamW:
    groups: Sequence[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=(0.9, 0.95))


class Muon(torch.optim.Optimizer):
    """Muon for matrices, whose updates it makes orthogonal (Jordan et al. 2024), and AdamW for vectors and stacks.

    A learning rate means about what it means to AdamW: updates of matrices are scaled to the size of AdamW's (Liu et
    al., arXiv 2502.16982). It is set at every step.
    """

    def __init__(self, model: EarlyExitModel, weight_decay: float) -> None:
        parameters = list(model.heads.parameters())
        matrices = [p for p in parameters if p.ndim == 2]
        others = [p for p in parameters if p.ndim != 2]
        self._parts: dict[str, torch.optim.Optimizer] = {}
        if matrices:
            self._parts["muon"] = torch.optim.Muon(
                matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self._parts["adamw"] = _adamw(others, weight_decay)
        # The very groups of the parts, which read what is set in them.
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the heads by their gradients."""
        for part in self._parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of both under the keys of one, as `load_state_dict` takes them."""
        return {"state": {name: part.state_dict() for name, part in self._parts.items()}, "param_groups": []}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict["state"][name])
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]


OPTIMIZERS = {"adamw": adamw, "muon": Muon}
