"""The rounds of hierarchical speculative decoding (HiSpec, arXiv 2510.01336) over a batch of sequences.

R packed rows; B sequences; K drafted tokens at most; V vocabulary; V_d draft vocabulary.

One recursion serves every method: a level verifies what the level below it proposes, and the lowest level proposes
token by token. Autoregressive decoding is the target with nothing below it, single-layer speculation has one level
below, HiSpec two. Before a level verifies, the last proposed token has been run through the levels below, so that full
acceptance always brings a bonus token. A level below the target may propose more than it was asked for: its last
verification is not cut short.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .model_runner import ModelRunner
from .sampling import draw, gumbel_noise, mend, to_probs
from .sequence import Chunk, Proposal, Sequence
from .verify import verify_by_equality, verify_by_rejection


class Rows(NamedTuple):
    """What a level says at some positions, for one sequence."""

    ids: Tensor | None  # [R] int64, its choice, where the rule is equality
    probs: Tensor | None  # [R, V] float32, where the rule is rejection


class Hierarchy:
    """Drafts, verifies and commits; `lengths[k]` is how many tokens level k asks of the level below it."""

    def __init__(self, runner: ModelRunner, lengths: Items[int], generator: torch.Generator) -> None:
        self._runner = runner
        self._lengths = lengths
        self._generator = generator
        self._top = len(runner.levels) - 1

    def prefill(self, chunks: list[Chunk]) -> None:
        """Read committed tokens; commit one more for each sequence that is then read to its end."""
        start = time.perf_counter()
        sequences = [chunk.sequence for chunk in chunks if chunk.stop == len(chunk.sequence.token_ids)]
        logits = self._runner.prefill(chunks)
        if logits is not None:
            logits, failures = mend(logits, [1] * len(sequences))
            ends = [len(sequence.token_ids) for sequence in sequences]
            rows = self._read(logits, sequences, [(end - 1, end) for end in ends], vocab_ids=None)
            _, next_ids = self._verify_rows(sequences, [[] for _ in sequences], rows)
            for b, sequence in enumerate(sequences):
                sequence.is_read = True
                if b in failures:
                    sequence.fail()
                    continue
                sequence.commit([next_ids[b]])
                sequence.stats.num_prefills += 1
        seconds = (time.perf_counter() - start) / sum(chunk.stop - chunk.start for chunk in chunks)
        for chunk in chunks:
            chunk.sequence.stats.prefill_seconds += seconds * (chunk.stop - chunk.start)

    def round(self, sequences: list[Sequence]) -> None:
        """Commit at least one token for each sequence, or end it where the target has no finite logits."""
        self._verify(self._top, sequences)

    def _propose(self, level: int, sequences: list[Sequence], wanted: list[int]) -> None:
        """Let at least `wanted[b]` tokens leave `level`; exactly so many at the lowest."""
        if level == 0:
            for place in range(max(wanted)):
                self._draft([sequence for sequence, number in zip(sequences, wanted, strict=True) if number > place])
            return
        while active := [
            sequence
            for sequence, number in zip(sequences, wanted, strict=True)
            if len(sequence.proposed[level]) < number
        ]:
            self._verify(level, active)

    def _draft(self, sequences: list[Sequence]) -> None:
        """Draw one token at the lowest level."""
        with self._timed(0, sequences):
            self._runner.advance(0, sequences)
            newest = [sequence.num_known - 1 for sequence in sequences]
            rows, _ = self._score(0, sequences, newest)
            _, token_ids = self._verify_rows(sequences, [[] for _ in sequences], rows)
            for sequence, row, token_id in zip(sequences, rows, token_ids, strict=True):
                sequence.proposed[0].append(Proposal(token_id, None if row.probs is None else row.probs[0]))
                sequence.stats.levels[self._runner.levels[0].name].num_rounds += 1

    def _verify(self, level: int, sequences: list[Sequence]) -> None:
        """Ask the level below for tokens, keep what stands, add one token; the target commits them."""
        if level > 0:
            # Below the target the added token needs room too; the target's own is what the room leaves.
            num_added = 0 if level == self._top else 1
            self._propose(level - 1, sequences, [min(self._lengths[level], s.room - num_added) for s in sequences])
        for lower in range(level):
            with self._timed(lower, sequences):
                self._runner.advance(lower, sequences)
        with self._timed(level, sequences):
            drafts = [sequence.proposed[level - 1] if level > 0 else [] for sequence in sequences]
            starts = [s.num_known - 1 - len(draft) for s, draft in zip(sequences, drafts, strict=True)]
            self._runner.advance(level, sequences)
            rows, failures = self._score(level, sequences, starts)
            accepted, next_ids = self._verify_rows(sequences, drafts, rows)
        name = self._runner.levels[level].name
        for b, sequence in enumerate(sequences):
            # A row that decided nothing, because a draft before it was rejected, may be anything.
            has_failed = level == self._top and failures.get(b, accepted[b] + 1) <= accepted[b]
            if has_failed:
                accepted[b] = failures[b]
            kept = [proposal.token_id for proposal in drafts[b][: accepted[b]]] + [next_ids[b]]
            sequence.stats.levels[name].count_verification(len(drafts[b]), accepted[b])
            sequence.rollback(starts[b] + accepted[b] + 1, level)
            drafts[b].clear()
            if has_failed:
                sequence.commit(kept[:-1])
                if sequence.finish_reason is None:
                    sequence.fail()
            elif level == self._top:
                sequence.commit(kept)
            else:
                probs = rows[b].probs
                sequence.proposed[level].extend(
                    Proposal(token_id, None if probs is None else probs[place]) for place, token_id in enumerate(kept)
                )

    def _score(
        self, level: int, sequences: list[Sequence], starts: list[int]
    ) -> tuple[list[Rows], dict[int, int]]:  # and by sequence, the first of its rows that is not finite
        logits = scored = self._runner.score(level, sequences, starts)
        bounds = [(start, sequence.num_known) for sequence, start in zip(sequences, starts, strict=True)]
        failures: dict[int, int] = {}
        # Where the rule is equality any token is a valid draft, whatever it was read from.
        if level == self._top or any(sequence.uses_rejection for sequence in sequences):
            counts = [stop - start for start, stop in bounds]
            logits, failures = mend(scored, counts)
            suspects = [b for b in failures if counts[b] > 1 and level == self._top]
            if suspects:
                parts = list(scored.split(counts))
                for b in suspects:
                    parts[b] = self._score_one_by_one(sequences[b])
                logits, failures = mend(torch.cat(parts), counts)
        return self._read(logits, sequences, bounds, self._runner.vocab_ids(level)), failures

    def _score_one_by_one(self, sequence: Sequence) -> Tensor:  # [K + 1, V]
        """The target's rows for its drafted tokens, computed anew without looking at any token ahead of time.

        Attention gives masked positions the weight 0, and 0 times NaN is NaN: one drafted token for which the base
        has no finite states would spoil the rows of all before it, which plain decoding computes without it.
        """
        drafts = sequence.proposed[-1]
        held_back = list(drafts)
        drafts.clear()
        sequence.rollback(sequence.num_known - 1, self._top)
        rows = []
        for place in range(len(held_back) + 1):
            drafts.extend(held_back[len(drafts) : place])
            for level in range(self._top + 1):
                self._runner.advance(level, [sequence])
            rows.append(self._runner.score(self._top, [sequence], [sequence.num_known - 1]))
        return torch.cat(rows)

    def _read(
        self,
        logits: Tensor,  # [R, V or V_d]
        sequences: list[Sequence],
        bounds: list[tuple[int, int]],  # positions of each sequence's rows
        vocab_ids: Tensor | None,  # [V_d], where the rows score a draft vocabulary
    ) -> list[Rows]:
        """Apply each sequence's sampling parameters to its rows."""
        counts = [stop - start for start, stop in bounds]
        ids = logits.argmax(-1)
        ids = ids if vocab_ids is None else vocab_ids[ids]
        if all(sequence.params.is_greedy for sequence in sequences):
            return [Rows(part, None) for part in ids.split(counts)]
        probs = self._probs(logits, sequences, counts, vocab_ids)
        rows = []
        for sequence, bound, part, greedy_ids in zip(
            sequences, bounds, probs.split(counts), ids.split(counts), strict=True
        ):
            if sequence.params.is_greedy:
                rows.append(Rows(greedy_ids, None))
            elif sequence.uses_rejection:
                rows.append(Rows(None, part))
            else:
                # The row at position t chooses the token at position t + 1.
                noise = torch.stack([self._noise(sequence, position + 1) for position in range(*bound)])
                rows.append(Rows((part.log() + noise.to(part.device)).argmax(-1), None))
        return rows

    def _probs(
        self, logits: Tensor, sequences: list[Sequence], counts: list[int], vocab_ids: Tensor | None
    ) -> Tensor:  # [R, V]; rows of greedy sequences mean nothing
        params = [sequence.params for sequence, count in zip(sequences, counts, strict=True) for _ in range(count)]
        device = logits.device
        probs = to_probs(
            logits,
            torch.tensor([1.0 if each.is_greedy else each.temperature for each in params], device=device),
            torch.tensor([each.top_k for each in params], device=device),
            torch.tensor([each.top_p for each in params], device=device),
        )
        if vocab_ids is None:
            return probs
        full = torch.zeros(len(probs), self._runner.model.backbone.vocab_size, device=device)
        return full.index_copy_(1, vocab_ids, probs)

    def _noise(self, sequence: Sequence, position: int) -> Tensor:
        if position not in sequence.noise:
            assert sequence.params.seed is not None
            vocab_size = self._runner.model.backbone.vocab_size
            sequence.noise[position] = gumbel_noise(sequence.params.seed, position, vocab_size)
        return sequence.noise[position]

    def _verify_rows(
        self,
        sequences: list[Sequence],
        drafts: list[list[Proposal]],
        rows: list[Rows],  # one more row than drafted tokens
    ) -> tuple[list[int], list[int]]:  # num_accepted, next_ids
        """Apply each sequence's rule; without drafts this draws the next token."""
        num_accepted, next_ids = [0] * len(sequences), [0] * len(sequences)
        for by_rejection in (False, True):
            chosen = [b for b, sequence in enumerate(sequences) if sequence.uses_rejection == by_rejection]
            if not chosen:
                continue
            verify = self._reject if by_rejection else _compare
            accepted, following = verify([drafts[b] for b in chosen], [rows[b] for b in chosen])
            for b, number, token_id in zip(chosen, accepted.tolist(), following.tolist(), strict=True):
                num_accepted[b], next_ids[b] = number, token_id
        return num_accepted, next_ids

    def _reject(self, drafts: list[list[Proposal]], rows: list[Rows]) -> tuple[Tensor, Tensor]:
        target_probs = torch.nn.utils.rnn.pad_sequence(
            [row.probs for row in rows if row.probs is not None], batch_first=True
        )
        num_seqs, num_rows = target_probs.shape[:2]
        uniforms = torch.rand(num_seqs, num_rows, generator=self._generator).to(target_probs.device)
        if num_rows == 1:
            return torch.zeros(num_seqs, dtype=torch.int64), draw(target_probs[:, 0], uniforms[:, 0])
        draft_probs = torch.zeros_like(target_probs[:, :-1])
        for b, draft in enumerate(drafts):
            for place, proposal in enumerate(draft):
                assert proposal.probs is not None
                draft_probs[b, place] = proposal.probs
        ids, num_drafted = _pad_ids(drafts, num_rows - 1, target_probs.device)
        return verify_by_rejection(ids, draft_probs, target_probs, num_drafted, uniforms)

    @contextmanager
    def _timed(self, level: int, sequences: list[Sequence]) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = (time.perf_counter() - start) / len(sequences)
        for sequence in sequences:
            sequence.stats.levels[self._runner.levels[level].name].seconds += seconds


def _compare(drafts: list[list[Proposal]], rows: list[Rows]) -> tuple[Tensor, Tensor]:
    target_ids = torch.nn.utils.rnn.pad_sequence([row.ids for row in rows if row.ids is not None], batch_first=True)
    ids, num_drafted = _pad_ids(drafts, target_ids.shape[1] - 1, target_ids.device)
    return verify_by_equality(ids, target_ids, num_drafted)


def _pad_ids(drafts: list[list[Proposal]], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = [[proposal.token_id for proposal in draft] + [0] * (length - len(draft)) for draft in drafts]
    counts = torch.tensor([len(draft) for draft in drafts], device=device)
    return torch.tensor(ids, dtype=torch.int64, device=device).view(len(drafts), length), counts
