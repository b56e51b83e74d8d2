"""Rounds in which the target alone verifies trees of tokens, all of a tree in one pass.

R packed rows; V vocabulary.

The target's own token is found at each node by itself: its choice, or a draw where requests without a seed are sampled.
The path that these lead along from the root is what is committed, with the last node's token behind it. So whatever the
tree holds, each token is drawn from the target's own distribution behind those before it: lossless by both rules.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .logits_reader import LogitsReader
from .model_runner import ModelRunner
from .sampling import draw
from .sequence import Sequence
from .stats import timed
from .token_tree import TokenTree
from .transfer import to_device


class TreeDraft(NamedTuple):
    """A tree for one sequence, and what is asked of the target about it."""

    tree: TokenTree
    num_asked: int
    """Its first nodes, the root at least: what the target says there decides. Each one's parent is among them."""
    probes: list[int]
    """Nodes at which the drafter wants to know the target's likeliest token, for later drafts."""


class TreeDrafter(Protocol):
    """Grows trees behind the newest tokens."""

    num_names: int
    """As of a `Proposer`: here the origin of all drafted tokens is 0."""
    max_nodes: int
    """Of a tree, at most."""

    def draft(self, sequences: list[Sequence], max_nodes: list[int]) -> list[TreeDraft]:
        """A tree for each sequence, of at most so many nodes; asked nodes at most `room` deep.

        It may depend on what was committed and probed before, and on nothing that is drawn in this round.
        """

    def learn(self, sequence: Sequence, draft: TreeDraft, next_ids: list[int]) -> None:
        """Take in the target's likeliest tokens at the draft's probes."""

    def forget(self, sequence: Sequence) -> None:
        """Begin anew: among the tree's tokens is one that the model cannot compute."""


class _Answer(NamedTuple):
    """What the target says about one tree."""

    path: list[int]  # nodes that are kept, the root first
    next_id: int  # behind them
    next_ids: list[int]  # at the probes
    is_usable: bool  # whether the root's logits are finite; if not, all else means nothing
    is_clean: bool  # whether those of all nodes are
    logits: Tensor  # [R, V], at the path's nodes; no rows where nobody asks for log-probabilities


class TreeVerifier:
    """Commits what the target keeps of a drafter's trees and its own token behind it."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: TreeDrafter,
        generator: torch.Generator,
        commit: Callable[[Sequence, list[int], list[int], Tensor], None],  # tokens, origins, logits behind each
        *,
        is_exact: bool,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._generator = generator
        self._commit = commit
        self._is_exact = is_exact
        assert len(runner.levels) == 1

    @torch.inference_mode()
    def round(self, sequences: list[Sequence]) -> None:
        """Commit at least one token for each sequence."""
        with timed([sequence.stats.levels["draft"] for sequence in sequences]):
            room = [self._runner.max_nodes(sequence) for sequence in sequences]
            drafts = self._drafter.draft(sequences, room)
        levels = [sequence.stats.levels["target"] for sequence in sequences]
        with timed(levels):
            answers = self._ask(sequences, drafts)
            for b in [b for b, answer in enumerate(answers) if not answer.is_usable and len(drafts[b].tree) > 1]:
                # Whose fault it is cannot be told: attention gives nodes that are not seen the weight 0, and 0 times
                # NaN is NaN.
                self._runner.erase_stale(sequences[b])
                self._drafter.forget(sequences[b])
                drafts[b] = TreeDraft(TokenTree(drafts[b].tree.token_ids[0]), 1, [])
                (answers[b],) = self._ask([sequences[b]], [drafts[b]])
            self._runner.keep_paths(sequences, [answer.path for answer in answers])
        for sequence, draft, answer, level in zip(sequences, drafts, answers, levels, strict=True):
            if not answer.is_clean:
                self._runner.erase_stale(sequence)
            num_accepted = len(answer.path) - 1
            sequence.stats.levels["draft"].num_rounds += draft.num_asked - 1
            level.count_verification(max(draft.tree.depths[: draft.num_asked]), num_accepted)
            if not answer.is_usable:
                sequence.fail()
                continue
            kept = [draft.tree.token_ids[node] for node in answer.path[1:]]
            origins = [0] * num_accepted + [self._drafter.num_names]
            self._commit(sequence, [*kept, answer.next_id], origins, answer.logits)
        going = [b for b, draft in enumerate(drafts) if draft.probes and sequences[b].finish_reason is None]
        if going:
            with timed([sequences[b].stats.levels["draft"] for b in going]):
                for b in going:
                    self._drafter.learn(sequences[b], drafts[b], answers[b].next_ids)

    def _ask(self, sequences: list[Sequence], drafts: list[TreeDraft]) -> list[_Answer]:
        """Run the target over the trees."""
        self._runner.advance_trees(0, sequences, [draft.tree for draft in drafts])
        # Behind all rows that decide lie those of the probes.
        asked: list[list[int]] = [list(range(draft.num_asked)) for draft in drafts]
        nodes = asked + [draft.probes for draft in drafts]
        logits = self._runner.score_nodes(sequences * 2, nodes)
        num_asked = sum(map(len, asked))
        choices, is_finite = self._choose(sequences, drafts, logits[:num_asked])
        likeliest = logits[num_asked:].max(-1)
        is_finite = torch.cat([is_finite, likeliest.values.isfinite()])
        bounds = list(pairwise(accumulate(map(len, nodes), initial=0)))
        ids, finite = torch.stack([torch.cat([choices, likeliest.indices]), is_finite.long()]).tolist()
        answers = []
        for b, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            rows, probed = slice(*bounds[b]), slice(*bounds[len(sequences) + b])
            path = draft.tree.chosen_path(ids[rows], finite[rows])
            wanted = [] if sequence.params.logprobs is None else [rows.start + node for node in path]
            answers.append(
                _Answer(
                    path,
                    ids[rows][path[-1]],
                    ids[probed],
                    bool(finite[rows][0]),
                    all(finite[rows]) and all(finite[probed]),
                    logits[wanted],
                )
            )
        return answers

    def _choose(
        self, sequences: list[Sequence], drafts: list[TreeDraft], logits: Tensor
    ) -> tuple[Tensor, Tensor]:  # [R] int64, the target's token at each asked node; [R] bool, whether it is one
        owners, bounds, token_ids = [], [], []
        for sequence, draft in zip(sequences, drafts, strict=True):
            root, output_ids = len(sequence.token_ids) - 1, sequence.output_ids
            for node in range(draft.num_asked):
                position = root + draft.tree.depths[node]
                owners.append(sequence)
                bounds.append((position, position + 1))
                token_ids.append(output_ids + draft.tree.ids_before(node) if sequence.logits_processor else [])
        reader = LogitsReader(
            owners,
            bounds,
            device=logits.device,
            vocab_size=self._runner.model.backbone.vocab_size,
            one_by_one=self._is_exact,
            token_ids=token_ids,
        )
        reading = reader(logits)
        rejecting = [row for row, owner in enumerate(owners) if owner.uses_rejection]
        if rejecting:
            assert reading.probs is not None
            rows = to_device(rejecting, logits.device)
            uniforms = to_device(torch.rand(len(rejecting), generator=self._generator), logits.device)
            reading.ids[rows] = draw(reading.probs[rows], uniforms)
        return reading.ids, reading.highest.isfinite()
