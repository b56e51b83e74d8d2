"""Tokens that may come next, as a tree: several continuations of one text that share what they have in common.

R nodes. A pass over a tree computes one row for each node at the node's own position, as if only its ancestors stood
before it; which tokens a level then keeps is one path from the root.
"""

from collections.abc import Sequence as Items

import numpy as np


class TokenTree:
    """Nodes in the order of their coming, the root first: node 0 is the newest known token of a text."""

    def __init__(self, root_id: int) -> None:
        self.token_ids = [root_id]
        self.parents = [-1]
        """By node; a parent comes before its children."""
        self.depths = [0]
        """By node: how many tokens behind the root it stands."""
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def child(self, node: int, token_id: int) -> int | None:
        """The node of `token_id` behind `node`, if there is one."""
        return self._children.get((node, token_id))

    def add(self, node: int, token_ids: Items[int]) -> int:
        """Let tokens follow one another behind `node`, by nodes that are there and by new ones; the last one's node."""
        for token_id in token_ids:
            following = self.child(node, token_id)
            if following is None:
                following = len(self)
                self.token_ids.append(token_id)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self._children[node, token_id] = following
            node = following
        return node

    def num_missing(self, node: int, token_ids: Items[int]) -> int:
        """How many nodes `add` would make."""
        for place, token_id in enumerate(token_ids):
            following = self.child(node, token_id)
            if following is None:
                return len(token_ids) - place
            node = following
        return 0

    def ids_before(self, node: int) -> list[int]:
        """The tokens from behind the root to `node`."""
        token_ids = []
        while node:
            token_ids.append(self.token_ids[node])
            node = self.parents[node]
        return token_ids[::-1]

    def ancestors(self) -> np.ndarray:  # [R, R] bool
        """Which nodes each node comes behind, itself included."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            seen[node] |= seen[parent]
        return seen

    def chosen_path(
        self,
        choices: Items[int],  # of the first nodes, the root at least: the token that comes next
        is_usable: Items[bool],  # of the same nodes, whether the choice is one
    ) -> list[int]:
        """The nodes from the root on that the choices lead through; the last one's choice is no node that is asked.

        Where each node's choice is drawn from what its level says at that node, the tokens of the path and the last
        choice are distributed as that level's own, for which nodes there are does not depend on the draws.
        """
        path = [0]
        while True:
            following = self.child(path[-1], choices[path[-1]])
            if following is None or following >= len(choices) or not is_usable[following]:
                return path
            path.append(following)


def tree_mask(
    trees: Items[TokenTree],  # of B sequences
    starts: Items[int],  # slot of each root, counted within its sequence; before it lie committed tokens
    num_queries: int,  # Q, the nodes of the largest tree at least; further rows repeat the last node
    num_keys: int,  # S
    window: int | None,  # sliding window in positions, the node itself included
) -> np.ndarray:  # [B, Q, S] bool
    """Which keys each node sees: all that is committed, and its ancestors, which lie in slots from the root's on."""
    mask = np.zeros((len(trees), num_queries, num_keys), dtype=bool)
    for seen, tree, start in zip(mask, trees, starts, strict=True):
        size = len(tree)
        seen[:, :start] = True
        seen[:size, start : start + size] = tree.ancestors()
        if window is not None:
            positions = np.arange(num_keys)
            positions[start : start + size] = start + np.array(tree.depths)
            seen[:size] &= positions > positions[start : start + size, None] - window
        seen[size:] = seen[size - 1]
    return mask
