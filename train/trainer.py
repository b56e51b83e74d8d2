"""The trainer: exit heads learn from the state cache to say what the base would have said."""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..checkpoints import TrainingState, load_training_state, save_training_state
from ..heads import EarlyExitModel
from ..recipes import deepspeed_config
from .best_heads import BestHeads
from .cache import StateSource
from .curve import Curve
from .evaluate import evaluate
from .exit_losses import ExitLosses
from .heap import give_back
from .loss import make_loss
from .ranks import Ranks
from .responses import describe_responses
from .schedule import learning_rate_at
from .share import share_of_batch
from .split import drop_unmeasured, plan_batches
from .strategy import Replicated, Strategy
from .tracker import Tracker, open_trackers
from .zero import Zero

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains the heads of `model` in place, float32 from then on, on the sequences `training` of the cache.

    Keeps checkpoints in `folder/checkpoints` and its curve in `folder/metrics.jsonl`; goes on from the newest
    checkpoint there, bit for bit as if it had never stopped. With several ranks each trains on its share of every
    batch, so that the heads are those of one rank, up to the order of summation; all ranks call the same methods.
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
        final_loss: str | None = None,  # of the last `final_share` of the steps; None is `loss`
        final_share: float = 0.2,
        exit_weights: Sequence[float] | None = None,  # see `ExitLosses`
        against: float | None = None,
        optimizer: str = "adamw",  # see `OPTIMIZERS`
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
        lr_schedule: str = "cosine",
        max_grad_norm: float = 1.0,
        precision: str | None = None,  # fp32, bf16 or fp16 products of the heads; None is the base's type
        activation_checkpointing: bool = False,
        save_total_limit: int = 2,
        save_best: bool = False,  # at the end the model gets the heads of the best evaluation
        early_stop: int | None = None,  # evaluations without a better one
        trackers: Sequence[str] = (),
        deepspeed: str | None = None,  # zero2, zero3 or a JSON file
        settings: Mapping[str, Any] | None = None,  # JSON-ready; what must be the same for a checkpoint to go on
        resume: bool = True,  # False forgets the checkpoints in `folder`
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.cache, self.folder = model, cache, folder
        self.ranks = ranks or Ranks()
        self.checkpoints, self.settings = folder / "checkpoints", dict(settings or {})
        self.held_out = held_out
        self.learning_rate, self.warmup_steps, self.lr_schedule = learning_rate, warmup_steps, lr_schedule
        self.max_grad_norm, self.max_window, self.seed = max_grad_norm, max_window, seed
        self.accumulation_steps = accumulation_steps
        self.eval_interval, self.checkpoint_interval = eval_interval, checkpoint_interval
        self.save_total_limit, self.save_best, self.early_stop = save_total_limit, save_best, early_stop
        lengths = {index: cache.sequences[index].num_answer_tokens for index in training}
        plan = plan_batches(list(lengths.values()), batch_tokens, num_epochs, seed)
        batches = [[training[place] for place in places] for places in plan]
        self.batches = drop_unmeasured(batches, cache.sequences)[:max_steps]
        self._first_final = len(self.batches) - round(final_share * len(self.batches))
        self.num_tokens = [sum(lengths[index] for index in batch) for batch in self.batches]
        model.heads.float().requires_grad_(True)
        self.num_steps = 0
        """Steps done."""
        with self.ranks.together():
            if self.ranks.is_main:
                folder.mkdir(parents=True, exist_ok=True)
                if not resume:
                    for old in (self.checkpoints, folder / "best"):
                        shutil.rmtree(old, ignore_errors=True)
        self._best = BestHeads(folder / "best", model, self.settings)
        with self.ranks.together():
            state = self._restore()
            # Without a checkpoint nothing of the curve stands: it may be that of other heads.
            self.curve = Curve(
                folder / "metrics.jsonl",
                -1 if state is None else state.step,
                None if state is None else state.content["losses"],
                writes=self.ranks.is_main,
            )
        losses = ExitLosses(
            model,
            make_loss(loss),
            final_loss=None if final_loss is None else make_loss(final_loss),
            exit_weights=exit_weights,
            against=against,
            precision=None if precision is None else PRECISIONS[precision],
            activation_checkpointing=activation_checkpointing,
        )
        saved = None if state is None else state.content["optimizer"]
        self.strategy: Strategy
        if deepspeed is None:
            scales = precision == "fp16" or (precision is None and model.backbone.dtype == torch.float16)
            self.strategy = Replicated(
                model, losses, weight_decay, self.ranks, optimizer=optimizer, scales_loss=scales, state=saved
            )
        else:
            config = deepspeed_config(deepspeed)
            self.strategy = Zero(model, losses, weight_decay, self.ranks, config, state=saved)
        self._tracker_names = trackers if self.ranks.is_main else ()
        self._trackers: list[Tracker] = []
        self._updating = False

    def run(self) -> None:
        """Train to the end. Raises ValueError, naming the step and its batch, where a loss is not finite.

        On Ctrl-C a checkpoint is written before KeyboardInterrupt goes on, with several ranks none: they may be
        anywhere, and the last one stands.
        """
        num_done = sum(self.num_tokens[: self.num_steps])
        total = sum(self.num_tokens)
        self._trackers = open_trackers(self._tracker_names, self.folder, self.settings, self.num_steps + 1)
        try:
            with tqdm(
                total=total, initial=num_done, unit="tok", desc="train", disable=not self.ranks.is_main
            ) as progress:
                self._evaluate_if_due()
                while self.num_steps < len(self.batches) and not self._is_stopped():
                    losses = self.step()
                    give_back()
                    progress.update(self.num_tokens[self.num_steps - 1])
                    progress.set_postfix_str(" ".join(f"{exit}: {value:.3f}" for exit, value in losses.items()))
                    if self.num_steps % self.checkpoint_interval == 0 or self.num_steps == len(self.batches):
                        self._save()
                    self._evaluate_if_due()
                    if self._is_stopped():
                        tqdm.write(f"no better acceptance in {self.early_stop} evaluations: training ends", sys.stderr)
                        self._save()
        except KeyboardInterrupt:
            # In the middle of an update the tensors belong to no step: the last checkpoint stands.
            if self.ranks.size == 1 and not self._updating:
                self._save()
            raise
        finally:
            for tracker in self._trackers:
                tracker.close()
        self.strategy.gather()
        if self.save_best:
            with self.ranks.together():
                self._best.take()

    def step(self) -> dict[str, float]:
        """One update of all heads; returns the mean loss of a token by exit layer."""
        losses = self._backward()
        # Head by head, so that no head's training depends on which others are trained beside it.
        norms = self.strategy.clip(self.max_grad_norm)
        self._check_finite(losses, norms)
        self._updating = True
        rate = learning_rate_at(
            self.num_steps, len(self.batches), self.learning_rate, self.warmup_steps, self.lr_schedule
        )
        self.strategy.step(rate)
        self.num_steps += 1
        self._updating = False
        self.curve.add(losses)
        values = {"learning_rate": rate}
        values |= {f"loss/{name}": loss for name, loss in losses.items()}
        values |= {f"gradient_norm/{name}": norm for name, norm in zip(losses, norms, strict=True)}
        self._track(values)
        return losses

    def _backward(self) -> dict[str, float]:
        """The gradient of the mean over all of a step's tokens, whatever the parts in which they are read."""
        indices, seed = self.batches[self.num_steps], self.seed + self.num_steps
        shares, num_rows = share_of_batch(
            self.cache.sequences, indices, self.ranks, self.accumulation_steps, self.max_window, seed
        )
        sums = torch.zeros(len(self.model.heads))
        is_final = self.num_steps >= self._first_final
        for share in shares:
            losses = self.strategy.losses(share.read(self.cache, self.model), share.windows, is_final)
            # A shared head has nothing to train, but its loss is shown beside those of the others.
            if trained := [total for total in losses if total.requires_grad]:
                # Strategies average over the ranks, which have different numbers of rows.
                self.strategy.backward(sum(total * self.ranks.size / num_rows for total in trained))  # type: ignore[arg-type]
            sums = sums.to(losses[0].device) + torch.stack([total.detach() for total in losses])
        means = self.ranks.sum(sums) / num_rows
        return {str(layer): mean for layer, mean in zip(self.model.exit_layers, means.tolist(), strict=True)}

    def _check_finite(self, losses: Mapping[str, float], norms: Sequence[float]) -> None:
        for (name, loss), norm in zip(losses.items(), norms, strict=True):
            if math.isfinite(loss) and (math.isfinite(norm) or self.strategy.can_skip()):
                continue
            responses = describe_responses([self.cache.sequences[index] for index in self.batches[self.num_steps]])
            # All ranks see the same sums.
            with self.ranks.together():
                raise ValueError(
                    f"at step {self.num_steps + 1} the loss of exit {name} is {loss} and its gradient's norm {norm}, "
                    f"on the responses {responses}; the last checkpoint is kept. "
                    f"Lower the learning rate ({self.learning_rate}) or look at them"
                )

    def _evaluate_if_due(self) -> None:
        is_due = self.num_steps % self.eval_interval == 0 or self.num_steps == len(self.batches)
        if not is_due or self.curve.last_step == self.num_steps:
            return
        self.strategy.gather()
        record: dict[str, Any] = {}
        with self.ranks.together():
            if self.ranks.is_main:
                report = evaluate(self.model, self.cache, self.held_out, max_window=self.max_window, distances=())
                record = {"step": self.num_steps, "num_tokens": sum(self.num_tokens[: self.num_steps])}
                record |= report["hops"]
                # First, so that a curve never tells of heads that a kill has lost.
                if self.save_best:
                    self._best.save_if_best(record, self.curve.records)
        record = json.loads(self.ranks.from_main(json.dumps(record)))
        with self.ranks.together():
            record = self.curve.write(record)
        if self.ranks.is_main:
            tqdm.write(describe(record), file=sys.stderr)
        self._track(
            {f"{name}/{hop}": value for hop, both in record.items() if "->" in hop for name, value in both.items()}
        )

    def _is_stopped(self) -> bool:
        return self.early_stop is not None and self._best.num_worse(self.curve.records) >= self.early_stop

    def _track(self, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(values, self.num_steps)

    def _save(self) -> None:
        self.strategy.gather()
        content = {
            "heads": self.model.heads.state_dict(),
            "optimizer": self.strategy.optimizer_state(),
            "losses": self.curve.losses,
        }
        with self.ranks.together():
            if self.ranks.is_main:
                state = TrainingState(step=self.num_steps, content=content)
                save_training_state(self.checkpoints, state, self.settings, num_kept=self.save_total_limit)

    def _restore(self) -> TrainingState | None:
        """Take the heads of the newest checkpoint, where there is one."""
        state = load_training_state(self.checkpoints, self.settings)
        if state is None:
            return None
        self.model.heads.load_state_dict(state.content["heads"])
        self.model.refresh_draft_vocab()
        self.num_steps = state.step
        return state


def describe(record: dict[str, Any]) -> str:
    """One line of the curve for the terminal."""
    hops = [f"{hop} {value['agreement']:.3f}" for hop, value in record.items() if "->" in hop]
    losses = " ".join(f"{value:.3f}" for value in record["loss"].values())
    where = f"step {record['step']} ({record['num_tokens']} tokens)"
    return f"{where}: loss {losses or '-'}; agreement {', '.join(hops)}"
