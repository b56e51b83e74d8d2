"""Each drafted token leaves at the first exit that is sure of it (AdaDecode, Wei et al. 2025, arXiv 2506.03700).

A token that no exit is sure of is the target's: the draft ends before it, and the target's pass, which completes all
layers of all drafted tokens side by side, chooses it. Layers that a token has left out are run the first time that a
later token, or the target, needs them. Verification is that of every other method, so the output is the model's own.
An exit decides on its distribution before a token is drawn from it: what was drawn is always verified.
"""

from functools import partial

import torch

from .logits_reader import Rows, read_logits
from .model_runner import ModelRunner
from .policy import Policy
from .sampling import draw
from .sequence import Proposal, Sequence
from .stats import timed


class AdaptiveExits:
    """Drafts for the target with all exits, token by token; sequences are grouped by how deep their token must go."""

    num_names = 0

    def __init__(
        self,
        runner: ModelRunner,
        policy: Policy,  # whether one more token is worth proposing
        generator: torch.Generator,
        *,
        exit_confidence: float,  # lowest highest probability of a row with which a token leaves
        one_by_one: bool,  # sample each row by itself
    ) -> None:
        self._runner = runner
        self._policy = policy
        self._generator = generator
        self._exit_confidence = exit_confidence
        self._num_exits = len(runner.levels) - 1
        self._read = partial(
            read_logits, vocab_size=runner.model.backbone.vocab_size, asks_confidence=True, one_by_one=one_by_one
        )

    def propose(self, sequences: list[Sequence]) -> None:
        """As `Proposer.propose`."""
        active = [sequence for sequence in sequences if sequence.wanted[-1]]
        # What the last rounds committed without asking a deep exit must reach its head before it leaves the window.
        for level in range(1, self._num_exits):
            if active:
                with timed([s.stats.levels[self._runner.levels[level].name] for s in active]):
                    self._runner.complete_head(level, active)
        while active:
            active = [
                sequence
                for sequence in self._draw_next(active)
                if len(sequence.proposed[-1]) < sequence.wanted[-1]
                and sequence.reach(self._num_exits - 1) >= self._policy.least_reach
            ]

    def _draw_next(self, sequences: list[Sequence]) -> list[Sequence]:
        """One more token for those of which an exit is sure; returns these."""
        served: list[Sequence] = []
        waiting = sequences
        for index, level in enumerate(self._runner.levels[:-1]):
            if not waiting:
                break
            with timed([sequence.stats.levels[level.name] for sequence in waiting]):
                self._runner.advance(index, waiting)
                bounds = [(sequence.num_known - 1, sequence.num_known) for sequence in waiting]
                logits = self._runner.score(index, waiting, [start for start, _ in bounds])
                rows = self._read(logits, waiting, bounds, self._runner.parts.vocab_ids(index))
                highest = torch.cat([row.confidence for row in rows if row.confidence is not None]).tolist()
                is_sure = [confidence >= self._exit_confidence for confidence in highest]
                leaving = [b for b, sure in enumerate(is_sure) if sure]
                token_ids = self._choose([waiting[b] for b in leaving], [rows[b] for b in leaving])
                for b, token_id in zip(leaving, token_ids, strict=True):
                    probs = rows[b].probs
                    proposal = Proposal(token_id, None if probs is None else probs[0], highest[b], index)
                    waiting[b].proposed[-1].append(proposal)
                    waiting[b].stats.levels[level.name].num_rounds += 1
                served += [waiting[b] for b in leaving]
                waiting = [sequence for sequence, sure in zip(waiting, is_sure, strict=True) if not sure]
        return served

    def _choose(self, sequences: list[Sequence], rows: list[Rows]) -> list[int]:
        """The rows' own choices, or draws from them where the rule is rejection."""
        token_ids = [row.ids[0] for row in rows]
        rejecting = [b for b, sequence in enumerate(sequences) if sequence.uses_rejection]
        if rejecting:
            probs = torch.cat([part for b in rejecting if (part := rows[b].probs) is not None])
            drawn = draw(probs, torch.rand(len(rejecting), generator=self._generator).to(probs.device))
            for b, token_id in zip(rejecting, drawn.tolist(), strict=True):
                token_ids[b] = token_id
        return token_ids
