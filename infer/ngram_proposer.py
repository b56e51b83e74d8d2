"""Drafts from the text itself: what followed the last time that its newest tokens stood there.

The method `ngram` (prompt lookup; the n-gram pool of Lookahead decoding, Fu et al. 2024, arXiv 2402.02057, without its
Jacobi window: the pool is filled by the prompt and by the target's own tokens alone). It needs no heads and runs no
layer to draft. A draft is a function of committed tokens, so its distribution is one-hot and both rules stay exact.
"""

import torch
from torch import Tensor

from .ngram_index import NgramIndex
from .sequence import Proposal, Sequence
from .stats import timed


class NgramProposer:
    """Copies drafts out of each sequence's own committed tokens."""

    num_names = 1

    def __init__(self, name: str, vocab_size: int, device: torch.device, *, min_ngram: int, max_ngram: int) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._device = device
        self._sizes = min_ngram, max_ngram

    def propose(self, sequences: list[Sequence]) -> None:
        """As `Proposer.propose`."""
        levels = [sequence.stats.levels[self._name] for sequence in sequences]
        with timed(levels):
            for sequence, level in zip(sequences, levels, strict=True):
                if sequence.ngram_index is None:
                    sequence.ngram_index = NgramIndex(*self._sizes)
                token_ids = sequence.ngram_index.continuation(sequence.token_ids, sequence.wanted[-1])
                sequence.proposed[-1].extend(self._proposal(sequence, token_id) for token_id in token_ids)
                level.num_rounds += len(token_ids)

    def _proposal(self, sequence: Sequence, token_id: int) -> Proposal:
        probs: Tensor | None = None
        if sequence.uses_rejection:
            probs = torch.zeros(self._vocab_size, device=self._device)
            probs[token_id] = 1
        return Proposal(token_id, probs, 1.0, 0)
