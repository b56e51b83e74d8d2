"""The rounds of hierarchical speculative decoding (HiSpec, arXiv 2510.01336) over a batch of sequences.

R packed rows; B sequences; K drafted tokens at most; V vocabulary; V_d draft vocabulary.

One recursion serves every method: a level verifies what the level below it proposes, and the lowest level proposes
token by token. Autoregressive decoding is the target with nothing below it, single-layer speculation has one level
below, HiSpec two; for other methods a `Proposer` drafts what the target verifies, and free drafts take single rounds
over from the exits, whose levels then only run their layers over what was drafted. Before a level verifies, the last
proposed token has been run through the levels below, so that full acceptance always brings a bonus token. A level below
the target may propose more than it was asked for: its last verification is not cut short.

A round in which nothing is drafted is a plain step: one pass through all layers, and no head runs. Heads with keys and
values of their own then fall behind; they catch up, many positions in one pass, before the states that they have not
seen leave the windows, or when the next draft asks them.
"""

import math
import time
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from .at_once import Judged
from .drafter import Drafter
from .logits_reader import Rows, read_logits
from .model_runner import ModelRunner
from .ngram_proposer import NgramProposer
from .policy import FixedPolicy, Policy, updated_share
from .proposer import Proposer
from .round_policy import RoundPolicy
from .sampling import draw
from .sequence import Chunk, Logprob, Proposal, Sequence, mean_length
from .stats import move_seconds, timed
from .tree_verifier import TreeDrafter, TreeVerifier
from .verify import verify_by_equality, verify_by_rejection


class Hierarchy:
    """Drafts, verifies and commits; `policies[k]` says how many tokens level k + 1 asks of level k."""

    def __init__(
        self,
        runner: ModelRunner,
        policies: Items[Policy],
        generator: torch.Generator,
        proposer: Proposer | None = None,
        tree_drafter: TreeDrafter | None = None,  # drafts trees, where nothing else drafts
        *,
        round_policy: RoundPolicy | None = None,  # decides about lengths, up to what `policies` allow
        free_drafts: NgramProposer | None = None,  # takes rounds over from the exits
        is_exact: bool = False,  # sample each row by itself
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._free_drafts = free_drafts
        self._first_name = sum(each.num_names for each in (proposer, tree_drafter, free_drafts) if each is not None)
        self._trees: TreeVerifier | None = None
        if tree_drafter is not None:
            self._trees = TreeVerifier(runner, tree_drafter, generator, _commit, is_exact=is_exact)
        self._policies = policies
        self._round_policy = round_policy
        self._read = partial(read_logits, vocab_size=runner.model.backbone.vocab_size, one_by_one=is_exact)
        self._generator = generator
        self._top = len(runner.levels) - 1
        self._has_copies = False  # in this round
        self._judged: Judged | None = None  # in this round, of drafts that are complete
        # Decides token by token; None where the lengths of drafts are known before.
        self._token_policy = round_policy if round_policy is not None and round_policy.by_confidence else None
        is_fixed = self._token_policy is None and all(isinstance(policy, FixedPolicy) for policy in policies)
        self._asks_confidence = not is_fixed
        self._drafter = Drafter(
            runner, generator, asks_confidence=self._asks_confidence, one_by_one=is_exact, origin=self._first_name
        )

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk]) -> None:
        """Read committed tokens; commit one more for each sequence that is then read to its end."""
        start = time.perf_counter()
        sequences = [chunk.sequence for chunk in chunks if chunk.stop == len(chunk.sequence.token_ids)]
        logits = self._runner.prefill(chunks)
        if logits is not None:
            bounds = [(len(sequence.token_ids) - 1, len(sequence.token_ids)) for sequence in sequences]
            rows = self._read(logits, sequences, bounds)
            _, next_ids = self._verify_rows(sequences, [[] for _ in sequences], rows)
            for sequence, row, token_id, part in zip(sequences, rows, next_ids, logits.split(1), strict=True):
                sequence.is_read = True
                if self._round_policy is not None and sequence.stats.num_prefills == 0:
                    sequence.kept_shares = self._round_policy.first_shares()
                if row.first_failure is not None:
                    sequence.fail()
                    continue
                _commit(sequence, [token_id], [self._first_name + self._top], part)
                sequence.stats.num_prefills += 1
        seconds = (time.perf_counter() - start) / sum(chunk.stop - chunk.start for chunk in chunks)
        for chunk in chunks:
            chunk.sequence.stats.prefill_seconds += seconds * (chunk.stop - chunk.start)

    @torch.inference_mode()
    def round(self, sequences: list[Sequence]) -> None:
        """Commit at least one token for each sequence."""
        if self._trees is not None:
            self._trees.round(sequences)
            return
        start, num_known = time.perf_counter(), sum(len(sequence.token_ids) for sequence in sequences)
        self._has_copies, self._judged = False, None
        if self._round_policy is not None:
            # Before any token of the round is drawn: who drafts may depend on nothing but tokens that are verified.
            shares = [sequence.kept_shares for sequence in sequences]
            chosen = self._round_policy.choose(shares, mean_length(sequences))
            for sequence, asked in zip(sequences, chosen, strict=True):
                sequence.asked = asked
        for level in range(self._top):
            if behind := self._runner.behind(level, sequences):
                with self._timed(level, behind):
                    self._runner.complete_head(level, behind)
        self._verify(self._top, sequences)
        if self._round_policy is not None:
            num_tokens = sum(len(sequence.token_ids) for sequence in sequences) - num_known
            self._round_policy.observe(num_tokens, time.perf_counter() - start, has_copies=self._has_copies)

    def _longest(self, level: int, sequence: Sequence) -> int:
        """The most tokens that the next level asks of `level` in this round."""
        asked = sequence.asked
        if asked is None or (self._token_policy is not None and any(asked)):
            return self._policies[level].length(sequence.kept_shares[level])
        return asked[level]

    def _propose(self, level: int, sequences: list[Sequence], *, judging: list[Sequence] | None) -> None:
        """Let the wanted tokens leave `level`, fewer where its policy stops; above the lowest it may be some more.

        The target may at once say what it thinks of drafts if these are all that `judging`, the round, asks it about.
        """
        propose = partial(self._draft, judging=judging) if level == 0 else partial(self._verify, level)
        while self._judged is None and (active := self._going_on(level, sequences)):
            propose(active)

    def _going_on(self, level: int, sequences: list[Sequence]) -> list[Sequence]:
        """Who proposes next, of those with room for it."""
        policy = self._policies[level]
        active = [s for s in sequences if len(s.proposed[level]) < s.wanted[level]]
        if self._token_policy is None:
            return [s for s in active if not s.proposed[level] or s.reach(level) >= policy.least_reach]
        beginning = [s for s in active if not s.proposed[level]]
        if beginning or not active:
            return beginning
        chances = [s.reach(level) * s.kept_shares[level] for s in active]
        num_drafted = sum(len(s.proposed[level]) for s in sequences)
        return [active[place] for place in self._token_policy.going_on(chances, num_drafted)]

    def _draft(self, sequences: list[Sequence], *, judging: list[Sequence] | None) -> None:
        """Draw tokens at the lowest level: all that are wanted, or, where each decides about the next, one of each, and
        of a lone sequence as many as that may be."""
        with self._timed(0, sequences):
            counts, least = [1] * len(sequences), None
            if not any(sequence.params.has_penalties for sequence in sequences):
                wanted = [sequence.wanted[0] - len(sequence.proposed[0]) for sequence in sequences]
                if not self._asks_confidence:
                    counts = wanted
                elif len(sequences) == 1 and not sequences[0].proposed[0]:
                    counts, least = wanted, self._least_reaches(sequences[0], wanted[0])
            order = sorted(range(len(sequences)), key=lambda b: -counts[b])
            ordered = [sequences[b] for b in order]
            if judging is not None and (len(judging) > len(sequences) or (self._asks_confidence and least is None)):
                judging = None  # some draft nothing, or it is not known yet who drafts another token
            drafts, self._judged = self._drafter.draft(ordered, [counts[b] for b in order], least, judging)
            for sequence, draft in zip(ordered, drafts, strict=True):
                sequence.proposed[0].extend(draft)
                sequence.stats.levels[self._runner.levels[0].name].num_rounds += len(draft)
        if self._judged is not None:
            names = [self._runner.levels[level].name for level in (0, self._top)]
            move_seconds(self._judged.seconds, [[s.stats.levels[name] for s in sequences] for name in names])

    def _least_reaches(self, sequence: Sequence, length: int) -> list[float]:
        """How likely all its drafted tokens must stand for another one, by how many these are."""
        if self._token_policy is None:
            return [self._policies[0].least_reach] * (length - 1)
        share = sequence.kept_shares[0]
        return [each / share if share > 0 else math.inf for each in self._token_policy.least_chances(length)]

    def _verify(self, level: int, sequences: list[Sequence]) -> None:
        """Ask the level below for tokens, keep what stands, add one token; the target commits them."""
        # The last list of proposals is the target's even where it is the only level.
        has_drafts = level > 0 or self._proposer is not None
        drafting = sequences
        if has_drafts:
            # Below the target the added token needs room too; the target's own is what the room leaves.
            num_added = 0 if level == self._top else 1
            for s in sequences:
                s.wanted[level - 1] = min(self._longest(level - 1, s), s.room - num_added)
            if self._proposer is not None:
                self._proposer.propose(sequences)
                # A lossy one may have finished some by itself.
                sequences = [sequence for sequence in sequences if sequence.finish_reason is None]
                if not sequences:
                    return
            else:
                if self._free_drafts is not None and level == self._top:
                    drafting = self._free_drafts.take_over(sequences)
                    self._has_copies = len(drafting) < len(sequences)
                self._propose(level - 1, drafting, judging=sequences if level == self._top else None)
        is_plain = level == self._top and all(s.num_computed[0] == s.num_computed[-1] for s in sequences)
        for lower in range(0 if is_plain else level):
            with self._timed(lower, sequences):
                self._runner.advance(lower, sequences)
        with self._timed(level, sequences):
            drafts = [sequence.proposed[level - 1] if has_drafts else [] for sequence in sequences]
            starts = [s.num_known - 1 - len(draft) for s, draft in zip(sequences, drafts, strict=True)]
            seen = [sequence.num_computed[level] for sequence in sequences]
            logits, rows = self._score(level, sequences, starts, seen, is_whole=is_plain)
            accepted, next_ids = self._verify_rows(sequences, drafts, rows)
        name = self._runner.levels[level].name
        for b, sequence in enumerate(sequences):
            # A row that decided nothing, because a draft before it was rejected, may be anything.
            failure = rows[b].first_failure if level == self._top else None
            has_failed = failure is not None and failure <= accepted[b]
            if failure is not None and has_failed:
                accepted[b] = failure
            kept = [proposal.token_id for proposal in drafts[b][: accepted[b]]] + [next_ids[b]]
            origins = [proposal.origin for proposal in drafts[b][: accepted[b]]] + [self._first_name + level]
            sequence.stats.levels[name].count_verification(len(drafts[b]), accepted[b])
            if has_drafts and sequence in drafting:
                self._observe(sequence, level, len(drafts[b]), accepted[b])
            sequence.rollback(starts[b] + accepted[b] + 1, level)
            if rows[b].first_failure is not None:
                self._runner.erase_stale(sequence)
            drafts[b].clear()
            if level == self._top:
                _commit(sequence, kept[:-1] if has_failed else kept, origins, logits[b])
                if has_failed and sequence.finish_reason is None:
                    sequence.fail()
            else:
                sequence.proposed[level].extend(_proposals(kept, origins, rows[b]))

    def _observe(self, sequence: Sequence, level: int, num_drafted: int, num_accepted: int) -> None:
        """Learn how often what the level below proposes is kept."""
        shares = sequence.kept_shares
        if self._round_policy is None:
            shares[level - 1] = updated_share(shares[level - 1], num_drafted, num_accepted)
            return
        shares[level - 1] = self._round_policy.updated_share(
            level - 1, shares[level - 1], num_drafted, num_accepted, sequence.num_plain_rounds
        )
        if level == self._top:
            sequence.num_plain_rounds = 0 if num_drafted else sequence.num_plain_rounds + 1

    def _score(
        self,
        level: int,
        sequences: list[Sequence],
        starts: list[int],
        seen: list[int],  # positions of each that the level had run over before this round
        *,
        is_whole: bool,  # run all levels at once
    ) -> tuple[list[Tensor | None], list[Rows]]:
        """Run the level; for each sequence what it says at the positions from `starts` to the newest, and the logits
        where these are wanted."""
        highest = None
        if level == self._top:
            logits, highest = self._runner.judge(sequences, starts, is_whole=is_whole, judged=self._judged)
            self._judged = None
        else:
            self._runner.advance(level, sequences)
            logits = self._runner.score(level, sequences, starts)
        bounds = [(start, sequence.num_known) for sequence, start in zip(sequences, starts, strict=True)]
        parts: list[Tensor | None] = [None] * len(sequences)
        if any(sequence.params.logprobs is not None for sequence in sequences):
            parts = list(logits.split([stop - start for start, stop in bounds]))
        vocab_ids = self._runner.parts.vocab_ids(level)
        asks_confidence = self._asks_confidence and level < self._top
        rows = self._read(
            logits, sequences, bounds, vocab_ids=vocab_ids, asks_confidence=asks_confidence, highest=highest
        )
        if level == self._top:
            for b, (sequence, (start, stop)) in enumerate(zip(sequences, bounds, strict=True)):
                if rows[b].first_failure is not None and stop - start > 1:
                    parts[b] = own = self._score_one_by_one(sequence, seen[b])
                    (rows[b],) = self._read(own, [sequence], [(start, stop)])
        return parts, rows

    def _score_one_by_one(self, sequence: Sequence, num_valid: int) -> Tensor:  # [K + 1, V]
        """The target's rows for its drafted tokens, computed anew without looking at any token ahead of time.

        Attention gives masked positions the weight 0, and 0 times NaN is NaN: one drafted token for which the base
        has no finite states would spoil the rows of all before it, which plain decoding computes without it.
        """
        drafts = sequence.proposed[-1]
        held_back = list(drafts)
        drafts.clear()
        sequence.rollback(min(num_valid, sequence.num_known - 1), self._top)
        self._runner.erase_stale(sequence)
        rows = []
        for place in range(len(held_back) + 1):
            drafts.extend(held_back[len(drafts) : place])
            for level in range(self._top + 1):
                self._runner.advance(level, [sequence])
            rows.append(self._runner.score(self._top, [sequence], [sequence.num_known - 1]))
        return torch.cat(rows)

    def _verify_rows(
        self,
        sequences: list[Sequence],
        drafts: list[list[Proposal]],
        rows: list[Rows],  # one more row than drafted tokens
    ) -> tuple[list[int], list[int]]:  # num_accepted, next_ids
        """Apply each sequence's rule; without drafts this draws the next token."""
        num_accepted, next_ids = [0] * len(sequences), [0] * len(sequences)
        rejecting = []
        for b, sequence in enumerate(sequences):
            if sequence.uses_rejection:
                rejecting.append(b)
            else:
                draft_ids = [proposal.token_id for proposal in drafts[b]]
                num_accepted[b], next_ids[b] = verify_by_equality(draft_ids, rows[b].ids)
        if rejecting:
            accepted, following = self._reject([drafts[b] for b in rejecting], [rows[b] for b in rejecting])
            for b, number, token_id in zip(rejecting, accepted.tolist(), following.tolist(), strict=True):
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

    def _timed(self, level: int, sequences: list[Sequence]) -> AbstractContextManager[None]:
        return timed([sequence.stats.levels[self._runner.levels[level].name] for sequence in sequences])


def _proposals(token_ids: list[int], origins: list[int], rows: Rows) -> list[Proposal]:
    """What leaves a level; row k chose token k or confirmed it."""
    confidence = [1.0] * len(token_ids) if rows.confidence is None else rows.confidence.tolist()
    return [
        Proposal(token_id, None if rows.probs is None else rows.probs[place], confidence[place], origins[place])
        for place, token_id in enumerate(token_ids)
    ]


def _commit(
    sequence: Sequence,
    token_ids: list[int],
    origins: list[int],  # of the tokens; there may be more
    logits: Tensor | None,  # [R, V], row k is what follows k of the tokens; there may be more; None: nobody wants them
) -> None:
    """Commit what the target kept and chose."""
    committed = sequence.commit(token_ids)
    sequence.origins += origins[: len(committed)]
    number = sequence.params.logprobs
    if number is None or logits is None:
        return
    logprobs = logits[: len(committed)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(committed, device=logits.device).unsqueeze(-1)).squeeze(-1)
    values, ids = logprobs.topk(min(number, logprobs.shape[-1]), dim=-1)
    for logprob, top_ids, top in zip(chosen.tolist(), ids.tolist(), values.tolist(), strict=True):
        sequence.logprobs.append(Logprob(logprob, dict(zip(top_ids, top, strict=True))))


def _pad_ids(drafts: list[list[Proposal]], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = [[proposal.token_id for proposal in draft] + [0] * (length - len(draft)) for draft in drafts]
    counts = torch.tensor([len(draft) for draft in drafts], device=device)
    return torch.tensor(ids, dtype=torch.int64, device=device).view(len(drafts), length), counts
