"""A benchmark: the same prompts by several methods, in turn, each timed and its texts checked.

A *round* is one batch of prompts answered by every method, one call each; every second round runs them backwards, so
that a machine that grows slower or faster favours none. Ratios are taken inside a round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from ..heads import EarlyExitModel
from .config import SamplingParams
from .footprint import PeakMemory
from .methods import BASELINE, METHODS, PLAIN
from .prompt_sets import PromptSet
from .recheck import recheck
from .way import Answers, Way, WaySettings

Record = dict[str, Any]
"""One call, JSON-ready; `bench_summary.py` says what it holds."""

WARM_UP_TOKENS = 16
NEAR_TIE_STEPS = 4
"""So many steps of the type at the size of the largest logit are a near tie."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is run; raises ValueError for numbers that cannot be."""

    methods: tuple[str, ...]
    """Names of `METHODS`, the baseline first; see `choose_methods`."""
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    """0 is greedy."""
    seed: int = 0
    """Of sampled texts."""
    max_new_tokens: int = 64
    num_repeats: int = 1
    """Times that every prompt is measured."""

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} are {list(values)}; give at least one, and each once")
        for size in (*self.batch_sizes, self.num_repeats):
            if size < 1:
                raise ValueError(f"a batch size or number of repeats is {size}; each must be at least 1")
        for temperature in self.temperatures:
            self.params(temperature)

    def params(self, temperature: float) -> SamplingParams:
        """How all prompts are answered at this temperature."""
        seed = None if temperature == 0 else self.seed
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=temperature, seed=seed)


class Round(NamedTuple):
    """One batch of prompts, by every method."""

    repeat: int
    batch_size: int
    temperature: float
    set_name: str
    group: int
    """Which batch of the set."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What a record of this round has in common with it."""
        return tuple(self)


class Benchmark:
    """Methods built for a model, and the rounds that compare them."""

    def __init__(
        self,
        model: EarlyExitModel,
        sets: Sequence[PromptSet],
        options: BenchOptions,
        settings: WaySettings,
    ) -> None:
        """Raises ValueError for a method that this model has too few heads for."""
        self.options = options
        self._base = model.base
        self._sets = {prompts.name: prompts for prompts in sets}
        self._ways: dict[str, Way] = {name: METHODS[name].build(model, settings) for name in options.methods}
        # Sampled texts are compared with those of our own plain decoding, which may not be among the methods.
        self._plain = cache(lambda: self._ways.get(PLAIN) or METHODS[PLAIN].build(model, settings))
        self._memory = PeakMemory(model.backbone.device)
        self._references: dict[tuple[str, int, float], list[int]] = {}
        self._refusals: dict[tuple[str, int, float], str] = {}
        self.memory_kind = self._memory.kind
        self.is_reduced = model.backbone.dtype != torch.float32
        """Whether the base computes in 16 bits, where near ties may fall either way."""
        self.max_gap = self._near_tie()
        """By how much another token than the model's first choice may be behind it and count as a near tie."""

    def rounds(self) -> list[Round]:
        """All that is to be measured, in order: the sets in turn, so that an early end leaves some of each."""
        options = self.options
        return [
            Round(repeat, batch_size, temperature, prompts.name, group)
            for repeat in range(options.num_repeats)
            for temperature in options.temperatures
            for batch_size in sorted(options.batch_sizes)
            for group in range(max(-(-len(prompts.ids) // batch_size) for prompts in self._sets.values()))
            for prompts in self._sets.values()
            if group * batch_size < len(prompts.ids)
        ]

    def warm_up(self, tell: Callable[[str], None] = lambda name: None) -> None:
        """Run each method once at each batch size and temperature, untimed; note which peer refuses what."""
        first = next(iter(self._sets))
        for name, way in self._ways.items():
            for batch_size in self.options.batch_sizes:
                for temperature in self.options.temperatures:
                    tell(f"{name}, batch {batch_size}")
                    _, prompts = self._batch(Round(0, batch_size, temperature, first, 0))
                    number = min(WARM_UP_TOKENS, self.options.max_new_tokens)
                    params = SamplingParams(
                        max_new_tokens=number,
                        temperature=temperature,
                        seed=self.options.params(temperature).seed,
                    )
                    answers = _call(name, way, prompts, params)
                    if isinstance(answers, str):
                        self._refusals[name, batch_size, temperature] = answers

    def measure(self, this: Round, number: int) -> list[Record]:
        """Answer one round's prompts by every method; one record each, in the order of the methods.

        `number` counts rounds: odd ones run backwards.
        """
        places, prompts = self._batch(this)
        params = self.options.params(this.temperature)
        names = list(self._ways)
        results: dict[str, tuple[Answers | str, int | None]] = {}
        for name in names[:: -1 if number % 2 else 1]:
            refusal = self._refusals.get((name, this.batch_size, this.temperature))
            if refusal is not None:
                results[name] = refusal, None
                continue
            self._memory.reset()
            answers = _call(name, self._ways[name], prompts, params)
            results[name] = answers, self._memory.read()
        own, _ = results.get(_reference_method(this.temperature), (None, None))
        if isinstance(own, Answers) and this.batch_size == 1:
            self._references.setdefault((this.set_name, places[0], this.temperature), own.token_ids[0])
        return [self._record(this, name, places, prompts, *results[name]) for name in names]

    def remember(self, record: Mapping[str, Any]) -> None:
        """Take the texts to compare with from a record of an interrupted run."""
        temperature = record["temperature"]
        is_own = record["method"] == _reference_method(temperature) and record["error"] is None
        if is_own and record["batch_size"] == 1:
            key = (record["set"], record["places"][0], temperature)
            self._references.setdefault(key, record["token_ids"][0])

    def _batch(self, this: Round) -> tuple[list[int], list[list[int]]]:
        """The places in their set, and the token ids, of a round's prompts; the last batch is filled from the front."""
        prompts = self._sets[this.set_name].token_ids
        start = this.group * this.batch_size
        places = [place % len(prompts) for place in range(start, start + this.batch_size)]
        return places, [prompts[place] for place in places]

    def _record(
        self,
        this: Round,
        name: str,
        places: list[int],
        prompts: list[list[int]],
        answers: Answers | str,
        peak_bytes: int | None,
    ) -> Record:
        record: Record = {
            "set": this.set_name,
            "temperature": this.temperature,
            "batch_size": this.batch_size,
            "repeat": this.repeat,
            "group": this.group,
            "method": name,
            "places": places,
            "prompt_ids": [self._sets[this.set_name].ids[place] for place in places],
            "num_prompt_tokens": [len(prompt) for prompt in prompts],
        }
        if isinstance(answers, str):
            return record | {"error": answers}
        return record | {
            "error": None,
            "token_ids": answers.token_ids,
            "seconds": answers.seconds,
            "first_seconds": answers.first_seconds,
            "peak_bytes": peak_bytes,
            "stats": None if answers.stats is None else answers.stats.to_dict(),
            "check": self._check(this, name, places, prompts, answers),
        }

    def _check(
        self, this: Round, name: str, places: list[int], prompts: list[list[int]], answers: Answers
    ) -> dict[str, Any] | None:
        """Compare with the model's own texts; None where any text may be the model's own."""
        if this.temperature != 0 and METHODS[name].promise != "lossless":
            return None
        params = self.options.params(this.temperature)
        num_equal, largest_gap, num_agreeing, num_not_chosen = 0, 0.0, 0, 0
        for place, prompt, token_ids in zip(places, prompts, answers.token_ids, strict=True):
            reference = self._reference(this.set_name, place, this.temperature)
            num_agreeing += common_prefix(token_ids, reference)
            num_equal += token_ids == reference
            # A sampled text that others are compared with is compared with the model itself.
            if token_ids == reference and not (name == PLAIN and this.temperature != 0):
                continue
            result = recheck(self._base, prompt, token_ids, params)
            largest_gap = max(largest_gap, result.largest_gap)
            num_not_chosen += result.num_not_chosen
        return {
            "num_texts": len(places),
            "num_equal": num_equal,
            "num_agreeing_tokens": num_agreeing,
            "num_not_chosen": num_not_chosen,
            "largest_gap": largest_gap if largest_gap != float("inf") else None,
            "is_lossless": largest_gap <= self.max_gap and (self.is_reduced or num_equal == len(places)),
        }

    def _reference(self, set_name: str, place: int, temperature: float) -> list[int]:
        """The text that is the model's own: greedy by `generate`, alone in its batch; sampled by our plain decoding."""
        key = (set_name, place, temperature)
        if key not in self._references:
            way = self._ways[BASELINE] if temperature == 0 else self._plain()
            answers = way([self._sets[set_name].token_ids[place]], self.options.params(temperature))
            self._references[key] = answers.token_ids[0]
        return self._references[key]

    @torch.inference_mode()
    def _near_tie(self) -> float:
        prompt = next(iter(self._sets.values())).token_ids[0]
        logits = self._base(input_ids=torch.tensor([prompt], device=self._base.device), logits_to_keep=1).logits
        return NEAR_TIE_STEPS * torch.finfo(self._base.dtype).eps * float(logits.abs().max())


def _reference_method(temperature: float) -> str:
    """Whose texts the others must have."""
    return BASELINE if temperature == 0 else PLAIN


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens that two texts have in common from their start."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return min(len(ours), len(theirs))


def _call(name: str, way: Way, prompts: list[list[int]], params: SamplingParams) -> Answers | str:
    """The answers, or what a peer, or a lossy method, refuses with."""
    try:
        return way(prompts, params)
    except Exception as error:
        promise = METHODS[name].promise
        if promise == "lossless" or (promise == "lossy" and not isinstance(error, ValueError)):
            raise
        # Peers raise of every kind; what they say is what their users get to see. A lossy method may refuse to sample.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
