"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): a model drafts for itself, without heads.

Each pass of the target runs over one tree behind the newest token, with two parts. The *lookahead branch* is a window
of W runs of N - 1 guessed tokens each (see `jacobi_window`); behind each of them the pass finds a further token, and
the N tokens together are an n-gram for the pool. The *verification branch* is the pool's n-grams that begin with the
newest token, G at most. What is kept of them is what the target itself would say, so any guess is allowed, and the
output is the model's own. Nodes that both parts, or several n-grams, have in common are computed once.

As in the authors' code the n-grams of the prompt are in the pool from the start, those of one first token give way to
newer ones, and the window moves on by one token a round, however many were committed. It differs in what the window is
filled with at first (the text's last tokens instead of random ones of the prompt).
"""

from .jacobi_window import add_columns, completed_ngrams, first_columns, next_columns
from .ngram_pool import NgramPool
from .sequence import Sequence
from .token_tree import TokenTree
from .tree_verifier import TreeDraft


class Lookahead:
    """Grows a tree for each sequence, out of its own window and pool."""

    num_names = 1

    def __init__(
        self,
        *,
        num_columns: int,  # W
        ngram_size: int,  # N
        max_candidates: int,  # G
    ) -> None:
        self._num_columns = num_columns
        self._ngram_size = ngram_size
        self._max_candidates = max_candidates
        self.max_nodes = num_columns * (ngram_size - 1) + max_candidates * (ngram_size - 1)

    def draft(self, sequences: list[Sequence], max_nodes: list[int]) -> list[TreeDraft]:
        """As `TreeDrafter.draft`."""
        return [self._draft(sequence, number) for sequence, number in zip(sequences, max_nodes, strict=True)]

    def _draft(self, sequence: Sequence, max_nodes: int) -> TreeDraft:
        if sequence.ngram_pool is None:
            sequence.ngram_pool = NgramPool(self._max_candidates)
            size, ids = self._ngram_size, sequence.token_ids
            for start in range(len(ids) - size + 1):
                sequence.ngram_pool.add(ids[start : start + size])
            sequence.jacobi_columns = first_columns(ids, self._num_columns, size - 1)
        newest = sequence.token_ids[-1]
        tree = TokenTree(newest)
        for rest in sequence.ngram_pool.rests(newest):
            rest = rest[: sequence.room]
            if len(tree) + tree.num_missing(0, rest) <= max_nodes:
                tree.add(0, rest)
        num_asked = len(tree)
        # No position may pass the end of the text, where the model's context may end.
        max_depth = sequence.max_length - len(sequence.token_ids)
        return TreeDraft(tree, num_asked, add_columns(tree, sequence.jacobi_columns, max_nodes, max_depth))

    def learn(self, sequence: Sequence, draft: TreeDraft, next_ids: list[int]) -> None:
        """As `TreeDrafter.learn`."""
        assert sequence.ngram_pool is not None
        for ngram in completed_ngrams(sequence.jacobi_columns, draft.tree.token_ids[0], next_ids):
            sequence.ngram_pool.add(ngram)
        sequence.jacobi_columns = next_columns(sequence.jacobi_columns, next_ids)

    def forget(self, sequence: Sequence) -> None:
        """As `TreeDrafter.forget`."""
        sequence.ngram_pool = None
