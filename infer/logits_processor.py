"""What a request asks to change in the logits, at every level alike, before they become a distribution.

R rows; V vocabulary; V_d draft vocabulary.
"""

from collections.abc import Collection
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from .config import SamplingParams


class LogitsProcessor:
    """Penalties, bias and bans of one request, for rows of any level at any of its positions.

    What depends on earlier tokens sees all of them, proposed ones included: so every level's row at a position is
    changed in the same way, and the acceptance rule stays lossless.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Items[int],
        end_ids: Collection[int],  # tokens that end the text
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._params = params
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64, device=device)
        self._num_prompt = self._num_counted = len(prompt_ids)
        # Of the committed tokens behind the prompt; proposed ones come on top row by row.
        self._counts = torch.zeros(vocab_size, device=device)
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._in_prompt[list(prompt_ids)] = True
        self._bias: Tensor | None = None
        if params.logit_bias or params.banned_token_ids:
            self._bias = torch.zeros(vocab_size, device=device)
            for token_id, bias in params.logit_bias.items():
                self._bias[token_id] = bias
            self._bias[list(params.banned_token_ids)] = -torch.inf

    def __call__(
        self,
        logits: Tensor,  # [R, V or V_d], rows of consecutive positions
        token_ids: Items[int],  # from the first one behind the prompt to the last row's own
        num_committed: int,  # of these
        start: int,  # position of the first row, which chooses the token behind it
        vocab_ids: Tensor | None = None,  # [V_d] int64, what the columns score; None is the whole vocabulary
    ) -> Tensor:  # [R, V or V_d] float32
        """The changed logits."""
        logits = logits.float()
        if self._params.has_penalties:
            counts = self._counts_before(len(logits), token_ids, num_committed)
            seen = self._in_prompt | (counts > 0)
            if vocab_ids is not None:
                counts, seen = counts[:, vocab_ids], seen[:, vocab_ids]
            logits = penalise(
                logits,
                counts,
                seen,
                repetition=self._params.repetition_penalty,
                presence=self._params.presence_penalty,
                frequency=self._params.frequency_penalty,
            )
        if self._bias is not None:
            logits = logits + (self._bias if vocab_ids is None else self._bias[vocab_ids])
        num_early = self._params.min_new_tokens - (start + 1 - self._num_prompt)
        if num_early > 0:
            columns = torch.arange(logits.shape[-1], device=logits.device) if vocab_ids is None else vocab_ids
            is_end = torch.isin(columns, self._end_ids)
            is_early = torch.arange(len(logits), device=logits.device) < num_early
            logits = logits.masked_fill(is_early[:, None] & is_end, -torch.inf)
        return logits

    def _counts_before(self, num_rows: int, token_ids: Items[int], num_committed: int) -> Tensor:  # [R, V] float32
        """How often each token stands behind the prompt before each row's choice."""
        new = token_ids[self._num_counted - self._num_prompt : num_committed]
        if new:
            ids = torch.tensor(new, device=self._counts.device)
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=self._counts.dtype))
            self._num_counted += len(new)
        counts = self._counts.repeat(num_rows, 1)
        first_row_sees = len(token_ids) - num_rows + 1
        for place, token_id in enumerate(token_ids[num_committed:], start=num_committed):
            counts[max(0, place + 1 - first_row_sees) :, token_id] += 1
        return counts


def penalise(
    logits: Tensor,  # [R, V] float32
    counts: Tensor,  # [R, V] float32, how often each token stands in the text so far
    seen: Tensor,  # [R, V] bool, whether it stands in the prompt or the text so far
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:  # [R, V] float32
    """Repetition penalty as in CTRL (Keskar et al. 2019), then presence and frequency penalty."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - presence * (counts > 0) - frequency * counts
