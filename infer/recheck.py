"""Whether a finished text is what the base itself would say: its own forward in transformers reads it once more.

R rows; V vocabulary.
"""

import math
import time
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .config import SamplingParams
from .logits_processor import LogitsProcessor
from .sampling import gumbel_noises, to_probs

MAX_ROWS = 256
"""Rows that are compared at once."""


@dataclass(kw_only=True)
class Recheck:
    """How far the tokens of one text, or of several, are the base's own choice."""

    num_tokens: int = 0
    """Tokens that were compared."""
    num_not_chosen: int = 0
    """Tokens of these that are not the base's choice at their place, given all before them."""
    largest_gap: float = 0.0
    """By how much the base's choice is ahead of such a token, at most: of its logit, or, for a seeded text, of its
    log-probability with noise; infinite where the base's top-k, top-p or min-p leaves a token out."""

    def add(self, other: "Recheck") -> None:
        """Add another text's."""
        self.num_tokens += other.num_tokens
        self.num_not_chosen += other.num_not_chosen
        self.largest_gap = max(self.largest_gap, other.largest_gap)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; an infinite gap is null."""
        return vars(self) | {"largest_gap": self.largest_gap if math.isfinite(self.largest_gap) else None}

    def describe(self) -> str:
        """One line."""
        num_chosen = self.num_tokens - self.num_not_chosen
        line = f"checked by the model's own forward: {num_chosen} of {self.num_tokens} tokens are its first choice"
        return f"{line}, the others at most {self.largest_gap:.3g} behind it" if self.num_not_chosen else line


class Rechecker:
    """`recheck` for one text after the other, with their sum and the time that it took."""

    def __init__(self, base: PreTrainedModel, eos_ids: Collection[int]) -> None:
        self._base = base
        self._eos_ids = eos_ids
        self.total = Recheck()
        self.seconds = 0.0

    def __call__(
        self, prompt_ids: Items[int], token_ids: Items[int], params: SamplingParams, *, index: int = 0
    ) -> Recheck:
        start = time.perf_counter()
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        result = recheck(self._base, prompt_ids, token_ids, params, index=index, end_ids=end_ids)
        self.total.add(result)
        self.seconds += time.perf_counter() - start
        return result


def check_rechecked(params: SamplingParams) -> None:
    """Raise ValueError for texts that no second reading could find right or wrong."""
    if not params.is_greedy and params.seed is None:
        raise ValueError(
            f"temperature is {params.temperature} without a seed, where any text may be the model's own; "
            "give a seed, or temperature 0, to check it"
        )


@torch.inference_mode()
def recheck(
    base: PreTrainedModel,
    prompt_ids: Items[int],
    token_ids: Items[int],
    params: SamplingParams,
    *,
    index: int = 0,  # which of the request's `n` texts
    end_ids: Collection[int] = (),  # tokens that end the text; only `min_new_tokens` asks for them
) -> Recheck:
    """Read prompt and text at once and compare each token with the base's choice; of equals the lowest id counts.

    In float32 all tokens should be its choice. In 16 bits two logits that are nearly equal may change places when rows
    are computed in another grouping, as they do in the base's own `generate`. Raises ValueError for sampling without
    a seed.
    """
    check_rechecked(params)
    result = Recheck(num_tokens=len(token_ids))
    if not token_ids:
        return result
    device = base.device
    known = torch.tensor([[*prompt_ids, *token_ids]], device=device)
    logits = base(input_ids=known[:, :-1], logits_to_keep=len(token_ids), use_cache=False).logits[0]
    processor = None
    if params.changes_logits:
        processor = LogitsProcessor(params, prompt_ids, end_ids, logits.shape[-1], device)
    for first in range(0, len(token_ids), MAX_ROWS):
        stop = min(first + MAX_ROWS, len(token_ids))
        start = len(prompt_ids) - 1 + first
        rows = logits[first:stop].float()
        if processor is not None:
            rows = processor(rows, token_ids[: stop - 1], first, start)
        if not params.is_greedy:
            rows = _noisy(rows, params, index, start)
        chosen = rows.max(-1)
        emitted = known[0, start + 1 : start + 1 + len(rows)]
        gaps = chosen.values - rows.gather(-1, emitted.unsqueeze(-1)).squeeze(-1)
        result.num_not_chosen += int((chosen.indices != emitted).sum())
        result.largest_gap = max(result.largest_gap, gaps.max().item())
    return result


def _noisy(
    rows: Tensor,  # [R, V]
    params: SamplingParams,
    index: int,
    start: int,  # position of the first row, which chooses the token behind it
) -> Tensor:  # [R, V]
    """What a seeded request takes the highest of."""
    assert params.seed is not None
    settings = (params.temperature, params.top_k, params.top_p, params.min_p)
    probs = to_probs(rows, *(torch.tensor([value] * len(rows), device=rows.device) for value in settings))
    noise = gumbel_noises([(params.seed, index, start + 1 + row) for row in range(len(rows))], rows.shape[-1])
    return probs.log() + torch.stack(noise).to(rows.device)
