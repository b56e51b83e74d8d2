"""The methods that a benchmark compares, by name; a new one is a new line here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ..heads import EarlyExitModel
from .config import LOSSY_METHODS, Method
from .peers import build_early_exit, build_generate, build_generate_batch, build_prompt_lookup
from .way import Way, WaySettings, build_engine, build_planned, engine_way

Promise = Literal["lossless", "lossy", "peer"]
BASELINE = "generate"
"""What ratios refer to, and in greedy decoding the texts; every benchmark runs it."""
PLAIN = "autoregressive"
"""Our engine without drafts: what speculation itself is worth, and whose sampled texts the others must have."""


@dataclass(frozen=True, kw_only=True)
class BenchMethod:
    """One method."""

    build: Callable[[EarlyExitModel, WaySettings], Way]
    """Makes it for a model; ValueError where the model has not what it needs."""
    promise: Promise
    """`lossless`: another text than the model's own is a failure; `lossy`: it is counted; `peer`: counted too, and
    what it refuses is told."""
    about: str
    """One phrase for the report."""
    num_heads: int = 0
    """Exit heads that it needs."""
    engine_method: Method | None = None
    """The method of an engine whose levels it has, if any."""
    ngram_drafts: bool = False
    """Whether that engine copies drafts too."""
    by_default: bool = True
    """Whether it runs where no methods are named."""


def _ours(method: Method, about: str, num_heads: int, *, ngram_drafts: bool = False) -> BenchMethod:
    def build(model: EarlyExitModel, settings: WaySettings) -> Way:
        return engine_way(build_engine(model, method, settings, ngram_drafts=ngram_drafts))

    is_lossy = method in LOSSY_METHODS
    return BenchMethod(
        build=build,
        promise="lossy" if is_lossy else "lossless",
        about=about,
        num_heads=num_heads,
        engine_method=method,
        ngram_drafts=ngram_drafts,
        # A lossy one by name alone: nobody shall get its texts unasked.
        by_default=not is_lossy and not ngram_drafts,
    )


def _build_auto(model: EarlyExitModel, settings: WaySettings) -> Way:
    """One engine for all batch sizes, as a server has it."""
    return engine_way(build_planned(model, settings))


METHODS = {
    BASELINE: BenchMethod(build=build_generate, promise="peer", about="transformers' plain `generate`"),
    PLAIN: _ours("autoregressive", "our engine, without drafts", 0),
    "single-layer": _ours("single-layer", "the first exit drafts for the target", 1),
    "hispec": _ours("hispec", "the first exit drafts, the second one verifies before the target does", 2),
    "single-layer+ngram": _ours("single-layer", "as single-layer, or drafts by n-grams", 1, ngram_drafts=True),
    "hispec+ngram": _ours("hispec", "as hispec, or drafts by n-grams", 2, ngram_drafts=True),
    "adadecode": _ours("adadecode", "each token leaves at the first exit that is sure of it (AdaDecode)", 1),
    "ngram": _ours("ngram", "drafts are copied from the text so far, by n-grams", 0),
    "lookahead": _ours("lookahead", "the target drafts for itself, by n-grams of its parallel guesses (Lookahead)", 0),
    "sprinter": _ours(
        "sprinter", "LOSSY: drafted tokens that a trained verifier trusts are never judged by the model (SPRINTER)", 1
    ),
    # By name alone: it measures the machine first, and needs an adapter that tells how often it is right.
    "auto": BenchMethod(build=_build_auto, promise="lossless", about='our engine with `plan="auto"`', by_default=False),
    "prompt-lookup": BenchMethod(
        build=build_prompt_lookup, promise="peer", about="`generate(prompt_lookup_num_tokens=5)`"
    ),
    "assistant-early-exit": BenchMethod(
        build=build_early_exit, promise="peer", about="`generate(assistant_early_exit=L // 4)`, without trained heads"
    ),
    "generate-batch": BenchMethod(
        build=build_generate_batch, promise="peer", about="`generate_batch`, continuous batching"
    ),
}


def choose_methods(names: Iterable[str] | None, num_heads: int) -> list[str]:
    """The names to run, the baseline always and first; None takes all that so many heads serve.

    ValueError for an unknown name.
    """
    if names is None:
        names = [name for name, method in METHODS.items() if method.by_default and method.num_heads <= num_heads]
    for name in (names := list(names)):
        if name not in METHODS:
            raise ValueError(f"method {name!r} is unknown; choose of {', '.join(METHODS)}")
    return list(dict.fromkeys([BASELINE, *names]))
