"""ZeRO: the heads, their gradients and their optimizer's state partitioned over the ranks, by DeepSpeed."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..heads import EarlyExitModel
from ..recipes import TrainingRecipe, deepspeed_config
from .cache import Batch
from .exit_losses import ExitLosses
from .optimizer import adamw
from .ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


OWN_SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    # Heads are clipped one by one; left out, DeepSpeed would clip all of them together to a norm of 1.
    "gradient_clipping": 0.0,
}


def check_zero(training: TrainingRecipe) -> None:
    """Raise ValueError, before hours of work, for what ZeRO cannot do, and where DeepSpeed is missing."""
    assert training.deepspeed is not None
    stage = deepspeed_config(training.deepspeed)["zero_optimization"]["stage"]
    if training.accumulation_steps > 1:
        raise ValueError(
            f"training.accumulation_steps is {training.accumulation_steps}, which ZeRO does not do here; use more "
            "ranks, a smaller training.batch_tokens, or leave --deepspeed out"
        )
    if training.optimizer != "adamw":
        raise ValueError(
            f"training.optimizer is {training.optimizer}, which needs whole matrices, and ZeRO cuts them up; "
            f"use adamw, with a training.learning_rate below {training.learning_rate}, or leave --deepspeed out"
        )
    if training.precision == "fp16":
        raise ValueError(
            "training.precision is fp16, which needs its loss scaled, and with --deepspeed it is not; "
            "use bf16, or leave --deepspeed out"
        )
    if stage == 3 and training.activation_checkpointing:
        raise ValueError(
            "training.activation_checkpointing computes a head again from weights that ZeRO-3 has dropped meanwhile; "
            "turn it off, or use --deepspeed zero2"
        )
    try:
        importlib.import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            f"--deepspeed needs the package deepspeed, which is not here ({error}); `pip install hispec[deepspeed]`"
        ) from error


class Zero:
    """Trains a twin of the heads by a DeepSpeed engine; the heads of the model stay whole, as `gather` left them.

    What goes into a checkpoint are whole tensors, gathered by DeepSpeed's public functions, never its own pickles: so
    any number of ranks and any strategy goes on from it.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        losses: ExitLosses,  # of the model itself; the twin gets its own
        weight_decay: float,
        ranks: Ranks,
        config: Mapping[str, Any],  # from `deepspeed_config`
        *,
        state: dict[str, Any] | None = None,  # from `optimizer_state`
    ) -> None:
        self._deepspeed: Any = importlib.import_module("deepspeed")
        self._access: Any = importlib.import_module("deepspeed.utils")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self._heads = model.heads
        twin = EarlyExitModel.from_configs(model.base, [head.config for head in model.exit_heads])
        twin.heads.float().requires_grad_(True).load_state_dict(model.heads.state_dict())
        twin.refresh_draft_vocab()
        self._twin = twin
        self._optimizer = adamw(twin, weight_decay)
        # Before DeepSpeed puts its flat partitions in their places.
        self._parameters: list[nn.Parameter] = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._groups = self._optimizer.state_dict()["param_groups"]
        self._state = state
        self._is_begun = False
        _join_alone(twin.backbone.device)
        self._deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self._engine: Any = self._deepspeed.initialize(
            model=losses.on(twin),
            optimizer=self._optimizer,
            config={**config, **OWN_SETTINGS},
            dist_init_required=False,
        )[0]
        # Stage 2 ties every group's state to its parameters at the first update of one of them: all must be there.
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            if not self._optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.zeros(()), **moments}

    def losses(self, batch: Batch, windows: Tensor, is_final: bool) -> list[Tensor]:
        """See `Strategy`."""
        if not self._is_begun:
            self._begin(batch, windows)
        losses: list[Tensor] = self._engine(batch, windows, is_final)
        return losses

    def backward(self, loss: Tensor) -> None:
        """See `Strategy`."""
        self._engine.backward(loss)

    def clip(self, max_norm: float) -> list[float]:
        """See `Strategy`; DeepSpeed itself would clip all heads as one."""
        norms = []
        for head in self._twin.heads:
            gradients = [(p, self._access.safe_get_full_grad(p)) for p in head.parameters()]
            squares = [gradient.float().square().sum() for _, gradient in gradients]
            norm = torch.stack(squares).sum().sqrt().item() if squares else 0.0
            norms.append(norm)
            if norm > max_norm:
                for parameter, gradient in gradients:
                    self._access.safe_set_full_grad(parameter, gradient * (max_norm / (norm + 1e-6)))
        return norms

    def can_skip(self) -> bool:
        """See `Strategy`."""
        return False

    def step(self, learning_rate: float) -> None:
        """See `Strategy`."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()

    def gather(self) -> None:
        """See `Strategy`."""
        for whole, parameter in zip(self._heads.parameters(), self._twin.heads.parameters(), strict=True):
            tensor = self._access.safe_get_full_fp32_param(parameter)
            with torch.no_grad():
                whole.copy_(tensor.view_as(whole))

    def optimizer_state(self) -> dict[str, Any]:
        """See `Strategy`."""
        if not self._is_begun:
            return self._state or {"state": {}, "param_groups": self._groups, "scaler": {}}
        state = {
            place: {
                "step": self._steps()[0].clone().float(),
                **{
                    name: self._access.safe_get_full_optimizer_state(parameter, name).cpu().view(shape)
                    for name in MOMENTS
                },
            }
            for place, (parameter, shape) in enumerate(zip(self._parameters, self._shapes(), strict=True))
        }
        return {"state": state, "param_groups": self._groups, "scaler": {}}

    def _begin(self, batch: Batch, windows: Tensor) -> None:
        """An update that changes nothing, after which DeepSpeed lets the optimizer's state be read and written."""
        losses = self._engine(batch, windows)
        self._engine.backward(sum(loss for loss in losses if loss.requires_grad) * 0.0)
        self.step(0.0)
        self._is_begun = True
        saved: dict[Any, Any] = self._state["state"] if self._state is not None else {}
        for place, (parameter, shape) in enumerate(zip(self._parameters, self._shapes(), strict=True)):
            for name in MOMENTS:
                value = saved[place][name] if saved else torch.zeros(shape)
                self._access.safe_set_full_optimizer_state(parameter, value.to(parameter.device), name)
        for step in self._steps():
            step.fill_(float(saved[0]["step"]) if saved else 0.0)
        self._state = None

    def _steps(self) -> list[Tensor]:
        """How often AdamW has updated each of its partitions; the same everywhere."""
        return [state["step"] for state in self._optimizer.state.values() if "step" in state]

    def _shapes(self) -> list[torch.Size]:
        """The whole shapes of the parameters, of which stage 3 leaves nothing in them."""
        shapes = {
            id(parameter): whole.shape
            for whole, parameter in zip(self._heads.parameters(), self._twin.heads.parameters(), strict=True)
        }
        return [shapes[id(parameter)] for parameter in self._parameters]


def _join_alone(device: torch.device) -> None:
    """DeepSpeed wants a process group, also of one process that no launcher started."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
