"""The trainer: exit heads learn from the state cache to say what the base would have said."""

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..checkpoints import TrainingState, load_training_state, save_training_state
from ..heads import EarlyExitModel
from .cache import StateSource, num_loss_rows
from .curve import Curve
from .evaluate import evaluate
from .exit_losses import ExitLosses
from .heap import give_back
from .loss import make_loss
from .responses import describe_responses
from .split import drop_unmeasured, plan_batches, split_evenly
from .windows import random_windows

MAX_GRAD_NORM = 1.0


class Trainer:
    """Trains the heads of `model` in place, float32 from then on, on the sequences `training` of the cache.

    Keeps checkpoints in `folder/checkpoints` and its curve in `folder/metrics.jsonl`; goes on from the newest
    checkpoint there, bit for bit as if it had never stopped.
    """

    def __init__(
        self,
        model: EarlyExitModel,
        cache: StateSource,
        training: Sequence[int],
        held_out: Sequence[int],
        folder: Path,
        *,
        loss: str = "forward_kl",  # see `make_loss`
        exit_weights: Sequence[float] | None = None,  # see `ExitLosses`
        against: float | None = None,
        learning_rate: float = 5e-4,
        warmup_steps: int = 50,
        weight_decay: float = 0.01,
        batch_tokens: int = 2048,
        accumulation_steps: int = 1,  # parts in which a step's sequences are read
        num_epochs: int = 3,
        max_steps: int | None = None,
        max_window: int = 8,
        eval_interval: int = 200,
        checkpoint_interval: int = 100,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,  # JSON-ready; what must be the same for a checkpoint to go on
        resume: bool = True,  # False forgets the checkpoints in `folder`
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.cache = model, cache
        self.checkpoints, self.settings = folder / "checkpoints", dict(settings or {})
        self.held_out = held_out
        self.losses = ExitLosses(model, make_loss(loss), exit_weights=exit_weights, against=against)
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.max_window, self.seed = max_window, seed
        self.accumulation_steps = accumulation_steps
        self.eval_interval, self.checkpoint_interval = eval_interval, checkpoint_interval
        lengths = {index: cache.sequences[index].num_answer_tokens for index in training}
        plan = plan_batches(list(lengths.values()), batch_tokens, num_epochs, seed)
        batches = [[training[place] for place in places] for places in plan]
        self.batches = drop_unmeasured(batches, cache.sequences)[:max_steps]
        self.num_tokens = [sum(lengths[index] for index in batch) for batch in self.batches]
        model.heads.float().requires_grad_(True)
        self.optimizer = _optimizer(model, weight_decay)
        self.num_steps = 0
        """Steps done."""
        if not resume:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        state = self._restore()
        # Without a checkpoint nothing of the curve stands: it may be that of other heads.
        self.curve = Curve(
            folder / "metrics.jsonl",
            -1 if state is None else state.step,
            None if state is None else state.content["losses"],
        )
        self._updating = False

    def run(self) -> None:
        """Train to the end. Raises ValueError, naming the step, where a loss is not finite.

        On Ctrl-C a checkpoint is written before KeyboardInterrupt goes on.
        """
        num_done = sum(self.num_tokens[: self.num_steps])
        with tqdm(total=sum(self.num_tokens), initial=num_done, unit="tok", desc="train") as progress:
            try:
                self._evaluate_if_due()
                while self.num_steps < len(self.batches):
                    losses = self.step()
                    give_back()
                    progress.update(self.num_tokens[self.num_steps - 1])
                    progress.set_postfix_str(" ".join(f"{exit}: {value:.3f}" for exit, value in losses.items()))
                    if self.num_steps % self.checkpoint_interval == 0 or self.num_steps == len(self.batches):
                        self._save()
                    self._evaluate_if_due()
            except KeyboardInterrupt:
                # In the middle of an update the tensors belong to no step: the last checkpoint stands.
                if not self._updating:
                    self._save()
                raise

    def step(self) -> dict[str, float]:
        """One update of all heads; returns the mean loss of a token by exit layer."""
        indices = self.batches[self.num_steps]
        losses = self._backward(indices)
        # Head by head, so that no head's training depends on which others are trained beside it.
        norms = [nn.utils.clip_grad_norm_([*head.parameters()], MAX_GRAD_NORM).item() for head in self.model.heads]
        for (name, loss), norm in zip(losses.items(), norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise ValueError(
                    f"at step {self.num_steps + 1} the loss of exit {name} is {loss} and its gradient's norm {norm}, "
                    f"on the responses {describe_responses([self.cache.sequences[index] for index in indices])}; "
                    f"the last checkpoint is kept. Lower the learning rate ({self.learning_rate}) or look at them"
                )
        self._updating = True
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.num_steps, len(self.batches), self.learning_rate, self.warmup_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        self._updating = False
        self.curve.add(losses)
        return losses

    def _backward(self, indices: Sequence[int]) -> dict[str, float]:
        """The gradient of the mean over all of a step's tokens, whatever the parts in which they are read."""
        sequences = [self.cache.sequences[index] for index in indices]
        lengths = [sequence.length for sequence in sequences]
        spans = [sequence.spans for sequence in sequences]
        windows = random_windows(lengths, spans, self.max_window, self.seed + self.num_steps).split(lengths)
        num_rows = sum(map(num_loss_rows, sequences))
        means = dict.fromkeys(map(str, self.model.exit_layers), 0.0)
        for part in split_evenly(lengths, self.accumulation_steps):
            batch = self.cache.read(indices[part], self.model.exit_layers, self.model.backbone)
            losses = [total / num_rows for total in self.losses(batch, torch.cat(windows[part]))]
            # A shared head has nothing to train, but its loss is shown beside those of the others.
            if trained := [loss for loss in losses if loss.requires_grad]:
                sum(trained).backward()
            for name, loss in zip(means, losses, strict=True):
                means[name] += loss.item()
        return means

    def _evaluate_if_due(self) -> None:
        is_due = self.num_steps % self.eval_interval == 0 or self.num_steps == len(self.batches)
        if not is_due or self.curve.last_step == self.num_steps:
            return
        report = evaluate(self.model, self.cache, self.held_out, max_window=self.max_window, distances=())
        record = {
            "step": self.num_steps,
            "num_tokens": sum(self.num_tokens[: self.num_steps]),
            **report["hops"],
        }
        tqdm.write(describe(self.curve.write(record)), file=sys.stderr)

    def _save(self) -> None:
        content = {
            "heads": self.model.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.curve.losses,
        }
        save_training_state(self.checkpoints, TrainingState(step=self.num_steps, content=content), self.settings)

    def _restore(self) -> TrainingState | None:
        """Go on from the newest checkpoint, where there is one."""
        state = load_training_state(self.checkpoints, self.settings)
        if state is None:
            return None
        self.model.heads.load_state_dict(state.content["heads"])
        self.model.refresh_draft_vocab()
        self.optimizer.load_state_dict(state.content["optimizer"])
        self.num_steps = state.step
        return state


def learning_rate_at(step: int, num_steps: int, peak: float, warmup_steps: int) -> float:
    """Linear warmup from 0, at most half of the way, then a cosine down to 0; `step` counts from 0."""
    warmup_steps = min(warmup_steps, num_steps // 2)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, num_steps - warmup_steps)))


def describe(record: dict[str, Any]) -> str:
    """One line of the curve for the terminal."""
    hops = [f"{hop} {value['agreement']:.3f}" for hop, value in record.items() if "->" in hop]
    losses = " ".join(f"{value:.3f}" for value in record["loss"].values())
    where = f"step {record['step']} ({record['num_tokens']} tokens)"
    return f"{where}: loss {losses or '-'}; agreement {', '.join(hops)}"


def _optimizer(model: EarlyExitModel, weight_decay: float) -> torch.optim.AdamW:
    parameters = list(model.heads.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))
