"""Drafts from the text itself: what followed the last time that its newest tokens stood there.

Alone it is the method `ngram` (prompt lookup; the n-gram pool of Lookahead decoding, Fu et al. 2024, arXiv 2402.02057,
without its Jacobi window: the pool is filled by the prompt and by the target's own tokens alone). Beside exits it takes
over the rounds for which it promises more than they do; the target alone verifies its tokens, because an intermediate
exit agrees with the target less often than they do. It needs no heads and runs no layer to draft.

A draft, its length, and whether there is one are functions of committed tokens and of what was kept before, so its
distribution is one-hot and both rules stay exact.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from .free_drafts import FIRST_SHARES, MAX_MATCHED, best_copy, exits_cost, exits_rate, max_copied, updated_shares
from .ngram_index import Continuation, NgramIndex
from .policy import Policy
from .sequence import Proposal, Sequence, mean_length
from .stats import timed

RowCost = Callable[[int, float], float | None]
"""By the number of sequences and their tokens in the mean: what one more row costs, see `free_drafts`; None where that
was not measured."""


class NgramProposer:
    """Copies drafts out of each sequence's own committed tokens, as long as promises most tokens for their cost."""

    num_names = 1

    def __init__(
        self,
        name: str,
        vocab_size: int,
        device: torch.device,
        *,
        min_ngram: int,
        max_ngram: int,
        max_length: int,  # most tokens of a draft
        exit_layers: Items[int] = (),  # that it takes over from, the draft's first
        num_layers: int = 0,
        policies: Items[Policy] = (),  # what is asked of each of these exits
        row_cost: RowCost | None = None,  # as measured
    ) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._device = device
        self._sizes = min_ngram, max_ngram
        self._max_length = max_length
        self._exit_layers = exit_layers
        self._num_layers = num_layers
        self._policies = policies
        self._row_cost: RowCost = row_cost or (lambda num_seqs, context: None)

    def propose(self, sequences: list[Sequence]) -> None:
        """As `Proposer.propose`."""
        with timed([sequence.stats.levels[self._name] for sequence in sequences]):
            num_seqs, row_cost = len(sequences), self._row_cost(len(sequences), mean_length(sequences))
            for sequence in sequences:
                found = self._look_up(sequence)
                most = min(len(found.token_ids), sequence.wanted[-1])
                length, _ = best_copy(sequence.ngram_shares, found.num_matched, most, num_seqs, row_cost)
                self._copy(sequence, found.token_ids[:length])

    def take_over(self, sequences: list[Sequence]) -> list[Sequence]:
        """Draft for those for which it promises more than the exits do; returns the others, with nothing proposed.

        What is wanted of the deepest exit must be known.
        """
        if not max_copied(len(sequences)):
            return sequences
        others = []
        with timed([sequence.stats.levels[self._name] for sequence in sequences]):
            num_seqs, row_cost = len(sequences), self._row_cost(len(sequences), mean_length(sequences))
            for sequence in sequences:
                found = self._look_up(sequence)
                most = min(len(found.token_ids), sequence.room)
                length, rate = best_copy(sequence.ngram_shares, found.num_matched, most, num_seqs, row_cost)
                if length and rate >= self._exits_rate(sequence, num_seqs, row_cost):
                    self._copy(sequence, found.token_ids[:length])
                else:
                    others.append(sequence)
        return others

    def _exits_rate(self, sequence: Sequence, num_seqs: int, row_cost: float | None) -> float:
        shares = sequence.kept_shares
        lengths = [policy.length(share) for policy, share in zip(self._policies, shares, strict=True)]
        cost = exits_cost(self._exit_layers, self._num_layers, lengths, shares)
        length = sequence.wanted[-1] if sequence.asked is None else min(sequence.wanted[-1], sequence.asked[-1])
        return exits_rate(shares[-1], length, cost, num_seqs, row_cost)

    def _look_up(self, sequence: Sequence) -> Continuation:
        """What its newest tokens were followed by; learns from what came of the last look, used or not."""
        if sequence.ngram_index is None:
            sequence.ngram_index = NgramIndex(*self._sizes, MAX_MATCHED)
            sequence.ngram_shares = list(FIRST_SHARES)
        if sequence.ngram_guess is not None:
            length, guess = sequence.ngram_guess
            came = sequence.token_ids[length : length + self._max_length]
            sequence.ngram_shares = updated_shares(sequence.ngram_shares, *guess, came)
        found = sequence.ngram_index.continuation(sequence.token_ids, self._max_length)
        sequence.ngram_guess = len(sequence.token_ids), found
        return found

    def _copy(self, sequence: Sequence, token_ids: list[int]) -> None:
        sequence.proposed[-1].extend(self._proposal(sequence, token_id) for token_id in token_ids)
        sequence.stats.levels[self._name].num_rounds += len(token_ids)

    def _proposal(self, sequence: Sequence, token_id: int) -> Proposal:
        probs: Tensor | None = None
        if sequence.uses_rejection:
            probs = torch.zeros(self._vocab_size, device=self._device)
            probs[token_id] = 1
        return Proposal(token_id, probs, 1.0, 0)
