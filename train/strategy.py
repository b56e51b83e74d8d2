"""Strategies: how one step of training is spread over the ranks."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..heads import EarlyExitModel
from .cache import Batch
from .exit_losses import ExitLosses
from .optimizer import OPTIMIZERS
from .ranks import Ranks


class Strategy(Protocol):
    """Trains the heads of a model; only they are spread, the frozen base is whole on every rank.

    All ranks call the same methods in the same order.
    """

    def losses(self, batch: Batch, windows: Tensor, is_final: bool) -> list[Tensor]:
        """`ExitLosses` on this rank's share of the batch."""

    def backward(self, loss: Tensor) -> None:
        """Take the gradients of `loss`, averaged over the ranks."""

    def clip(self, max_norm: float) -> list[float]:
        """The norm of each head's gradient, before it is scaled down to at most `max_norm`."""

    def can_skip(self) -> bool:
        """Whether a gradient that is not finite only means that the loss was scaled too far up (float16)."""

    def step(self, learning_rate: float) -> None:
        """Update the heads; with a gradient that is not finite nothing changes where `can_skip`."""

    def gather(self) -> None:
        """Bring whole tensors into the heads of the model, on every rank."""

    def optimizer_state(self) -> dict[str, Any]:
        """The state of a torch optimizer of `OPTIMIZERS`, whole, and of the scale of the loss."""


class Replicated:
    """Every rank has the whole heads and averages gradients with the others (DDP); with one rank, plain training.

    The heads of the model are themselves trained.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        losses: ExitLosses,
        weight_decay: float,
        ranks: Ranks,
        *,
        optimizer: str = "adamw",  # see `OPTIMIZERS`
        scales_loss: bool = False,  # against small gradients vanishing in float16
        state: dict[str, Any] | None = None,  # from `optimizer_state`
    ) -> None:
        self._heads = model.heads
        self._losses: nn.Module = DistributedDataParallel(losses) if ranks.size > 1 else losses
        self._optimizer = OPTIMIZERS[optimizer](model, weight_decay)
        self._scaler = torch.amp.GradScaler(model.backbone.device.type, enabled=scales_loss)
        if state is not None:
            self._optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
            if scales_loss:
                self._scaler.load_state_dict(state["scaler"])

    def losses(self, batch: Batch, windows: Tensor, is_final: bool) -> list[Tensor]:
        """See `Strategy`."""
        losses: list[Tensor] = self._losses(batch, windows, is_final)
        return losses

    def backward(self, loss: Tensor) -> None:
        """See `Strategy`."""
        self._scaler.scale(loss).backward()

    def clip(self, max_norm: float) -> list[float]:
        """See `Strategy`."""
        self._scaler.unscale_(self._optimizer)
        return [nn.utils.clip_grad_norm_([*head.parameters()], max_norm).item() for head in self._heads]

    def can_skip(self) -> bool:
        """See `Strategy`."""
        return self._scaler.is_enabled() and self._scaler.get_scale() > 1

    def step(self, learning_rate: float) -> None:
        """See `Strategy`."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)

    def gather(self) -> None:
        """See `Strategy`."""

    def optimizer_state(self) -> dict[str, Any]:
        """See `Strategy`."""
        return {**self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}
