"""One epoch three ways: cached states, online states, and the plain loop that computes whole logits.

T rows of whole sequences side by side; D hidden size; V vocabulary.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from ..checkpoints import fingerprint, load_base
from ..heads import Backbone, EarlyExitModel
from ..recipes import Recipe, load_recipe
from .base_states import base_states
from .cache import FINAL, LOG_NORMALISER, TOP_TOKEN, Batch, StateSource, make_batch, wanted_columns
from .cache_writer import extend_cache
from .exit_losses import ExitLosses
from .exit_states import batch_context, exit_state, head_logits
from .loss import make_loss
from .online import OnlineStates
from .pipeline import make_model, resolve
from .responses import Response, read_responses
from .split import plan_batches
from .windows import random_windows

WAYS = ("cached", "online", "whole")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One epoch of one way, in a process of its own."""

    way: str
    """`cached`, `online`, or `whole` for the plain loop."""
    num_tokens: int
    """Response tokens trained on."""
    num_steps: int
    """Updates."""
    seconds: float
    """Of the epoch; the cache was filled before it."""
    cpu_seconds: float
    """Of all threads of the process, which other processes on the machine lengthen less."""
    cache_seconds: float
    """To fill the cache; 0 where there is none."""
    start_memory: int
    """Bytes in use before the epoch: the base, the heads, the libraries."""
    peak_memory: int
    """Most bytes in use during the epoch: of the process on a CPU, of tensors on a GPU."""
    losses: dict[str, float]
    """By exit, the mean loss of the last step: what shows that the ways compute the same."""

    @property
    def rate(self) -> float:
        """Response tokens a second."""
        return self.num_tokens / self.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hispec.train.benchmark", description=__doc__)
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="alias or recipe file (default: smollm2)")
    parser.add_argument("--responses", type=Path, required=True, metavar="FILE", help="a run's responses.jsonl")
    parser.add_argument("--num-tokens", "--num_tokens", type=int, default=4000, metavar="N", help="response tokens")
    parser.add_argument("--dtype", default="auto", help="dtype of the base: auto, float32, bfloat16 or float16")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="A,B", help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a way")
    options = parser.parse_args(argv)
    try:
        ways = options.ways.split(",")
        if unknown := [way for way in ways if way not in WAYS]:
            raise ValueError(f"the way {unknown[0]!r} is unknown; choose from {', '.join(WAYS)}")
        recipe, responses = load_recipe(options.model), read_some(options.responses, options.num_tokens)
        for way in ways:
            # A process each, and this one small: memory that one way leaves behind is no other's.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                measured = pool.submit(measure, way, recipe, responses, options.dtype).result()
            print(json.dumps(asdict(measured)) if options.json else describe(measured), flush=True)
    except (OSError, ValueError) as error:
        print(f"hispec.train.benchmark: error: {error}", file=sys.stderr)
        return 2
    return 0


def read_some(path: Path, num_tokens: int) -> list[Response]:
    """The first responses of a file, up to `num_tokens` of their tokens."""
    responses: list[Response] = []
    for response in read_responses(path):
        if sum(len(other.token_ids) for other in responses) >= num_tokens:
            break
        responses.append(response)
    if not responses:
        raise ValueError(f"{path} holds no response; give the responses.jsonl of a run of hispec-train")
    return responses


def measure(way: str, recipe: Recipe, responses: Sequence[Response], dtype: str) -> Measurement:
    """Train the recipe's heads, new, for one epoch by forward KL."""
    base, _ = load_base(recipe.model.source, dtype=dtype, revision=recipe.model.revision)
    recipe = resolve(recipe, base)
    model = make_model(base, recipe, responses)
    model.heads.float().requires_grad_(True)
    losses: Callable[[Batch, Tensor], list[Tensor]] = ExitLosses(model, make_loss("forward_kl"))
    states: StateSource = OnlineStates(responses)
    if way == "whole":
        states, losses = WholeStates(responses), WholeLosses(model)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        if way == "cached":
            made_by = fingerprint(base)
            states = extend_cache(Path(folder), responses, model.backbone, model.exit_layers, fingerprint=made_by)
        cache_seconds = time.perf_counter() - start if way == "cached" else 0.0
        counts = [len(response.token_ids) for response in responses]
        batches = plan_batches(counts, recipe.training.batch_tokens, 1, recipe.training.seed)
        memory = Memory(model.backbone.device)
        start, cpu_start = time.perf_counter(), time.process_time()
        with memory:
            values = run_epoch(model, states, losses, batches, recipe)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return Measurement(
        way=way,
        num_tokens=sum(counts),
        num_steps=len(batches),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        cache_seconds=cache_seconds,
        start_memory=memory.start,
        peak_memory=memory.peak,
        losses=values,
    )


def run_epoch(
    model: EarlyExitModel,
    states: StateSource,
    losses: Callable[[Batch, Tensor], list[Tensor]],
    batches: Sequence[list[int]],
    recipe: Recipe,
) -> dict[str, float]:
    """An update for every batch; returns the mean losses of the last one by exit."""
    optimizer = torch.optim.AdamW(model.heads.parameters(), lr=recipe.training.learning_rate)
    values: dict[str, float] = {}
    for step, indices in enumerate(tqdm(batches, unit="step", leave=False)):
        batch = states.read(indices, model.exit_layers, model.backbone)
        windows = random_windows(batch.lengths, batch.num_prompts, recipe.training.max_window, step)
        means = [total / max(1, len(batch.loss_rows)) for total in losses(batch, windows)]
        torch.stack(means).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        values = {str(layer): mean.item() for layer, mean in zip(model.exit_layers, means, strict=True)}
    return values


class WholeStates:
    """As `OnlineStates`, without what the plain loop takes from whole logits itself."""

    def __init__(self, sequences: Sequence[Response]) -> None:
        self.sequences = list(sequences)

    def read(self, indices: Sequence[int], exit_layers: Sequence[int], backbone: Backbone) -> Batch:
        """The sequences at `indices`; their normalisers and top tokens are all 0."""
        sequences = [self.sequences[index] for index in indices]
        wanted = set(wanted_columns(exit_layers))
        columns = dict(base_states(backbone, sequences, wanted - {LOG_NORMALISER, TOP_TOKEN}))
        nothing = torch.zeros(len(columns[FINAL]), device=backbone.device)
        return make_batch(sequences, columns | {LOG_NORMALISER: nothing, TOP_TOKEN: nothing}, exit_layers, backbone)


class WholeLosses:
    """The plain loop's forward KL: the base's logits of all rows, and every head's, at once."""

    def __init__(self, model: EarlyExitModel) -> None:
        self.model = model

    def __call__(
        self,
        batch: Batch,
        windows: Tensor,  # [T] int64
    ) -> list[Tensor]:
        """The loss of each exit, `[]` float32, summed over the loss rows."""
        model = self.model
        with torch.no_grad():
            base_probs = model.backbone.logits(batch.final).float().softmax(-1)[batch.loss_rows]
        context = batch_context(batch, windows)
        losses = []
        for index, head in enumerate(model.exit_heads):
            logits = head_logits(model, index, exit_state(model, index, batch, context))
            ids = head.draft_vocab_ids
            probs = base_probs if ids is None else base_probs[:, ids]
            losses.append((torch.xlogy(probs, probs) - probs * logits.float().log_softmax(-1)).sum())
        return losses


class Memory:
    """While it is entered, watches how much memory is in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start = self.peak = self._in_use()
        """Bytes in use."""

    def __enter__(self) -> "Memory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self._ended.set()
            self._thread.join()

    def _in_use(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, self._in_use())


def describe(measured: Measurement) -> str:
    """One line for the terminal."""
    cache = f", after {measured.cache_seconds:.1f} s for the cache" if measured.cache_seconds else ""
    losses = ", ".join(f"{layer}: {loss:.4f}" for layer, loss in measured.losses.items())
    return (
        f"{measured.way:<7} {measured.rate:7.1f} tokens/s ({measured.num_tokens} in {measured.num_steps} steps and "
        f"{measured.seconds:.1f} s, {measured.cpu_seconds:.1f} s of CPU{cache}); memory "
        f"{measured.start_memory / 1e9:.2f} GB before, {measured.peak_memory / 1e9:.2f} GB at most; losses {losses}"
    )


if __name__ == "__main__":
    sys.exit(main())
