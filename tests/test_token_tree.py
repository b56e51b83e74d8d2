"""Token trees: pure functions, attention by ancestors, and the path that is kept, each against computing it plainly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.heads import DenseAttention
from hispec.infer import Engine, SamplingParams
from hispec.infer.attention import PagedAttention, Span
from hispec.infer.kv_cache import KVCache
from hispec.infer.token_tree import TokenTree, tree_mask

from .models import build_base, build_heads

BLOCK_SIZE, NUM_BLOCKS = 4, 64

PARENTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=25)
"""Behind which node (modulo those that there are) the next token comes."""


def grow(choices) -> TokenTree:
    tree = TokenTree(7)
    for parent, token_id in choices:
        tree.add(parent % len(tree), [token_id])
    return tree


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Nodes from the root to `node`, by parents alone."""
    return [*path_to(tree, tree.parents[node]), node] if node else [0]


@given(paths=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8))
def test_a_tree_holds_each_prefix_once(paths):
    tree, prefixes = TokenTree(7), {()}
    for path in paths:
        before, missing = len(tree), tree.num_missing(0, path)
        last = tree.add(0, path)
        assert len(tree) - before == missing
        assert tree.ids_before(last) == path
        prefixes |= {tuple(path[:length]) for length in range(len(path) + 1)}
        assert {tuple(tree.ids_before(node)) for node in range(len(tree))} == prefixes
        assert len(tree) == len(prefixes)
    for node in range(len(tree)):
        assert tree.depths[node] == len(tree.ids_before(node))
        assert np.flatnonzero(tree.ancestors()[node]).tolist() == path_to(tree, node)


@given(
    choices=PARENTS,
    chosen=st.lists(st.integers(0, 4), min_size=26, max_size=26),
    usable=st.lists(st.booleans(), min_size=26, max_size=26),
    share=st.floats(0, 1),
)
def test_the_path_follows_the_choices(choices, chosen, usable, share):
    tree = grow(choices)
    num_asked = 1 + int(share * (len(tree) - 1))
    path = tree.chosen_path(chosen[:num_asked], usable[:num_asked])
    assert path == path_to(tree, path[-1])
    assert max(path) < num_asked
    assert all(usable[node] for node in path[1:])
    assert [tree.token_ids[node] for node in path[1:]] == [chosen[node] for node in path[:-1]]
    following = [
        node
        for node in range(1, num_asked)
        if tree.parents[node] == path[-1] and tree.token_ids[node] == chosen[path[-1]] and usable[node]
    ]
    assert not following


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 25), PARENTS), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3, 40]),
    softcap=st.sampled_from([None, 0.5]),
    is_scattered=st.booleans(),
    is_exact=st.booleans(),
)
def test_each_node_attends_as_if_its_branch_were_the_text(shapes, window, softcap, is_scattered, is_exact):
    generator = torch.Generator().manual_seed(len(shapes))
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist() if is_scattered else list(range(NUM_BLOCKS))
    cache = KVCache(1, NUM_BLOCKS, BLOCK_SIZE, 2, 8, torch.float32, torch.device("cpu"))
    for pool in (*cache.keys, *cache.values):
        pool.fill_(torch.nan)
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    spans, trees, new_rows, expected = [], [], [], []
    for num_before, choices in shapes:
        tree = grow(choices)
        stop = num_before + len(tree)
        table = [order.pop() for _ in range(-(-stop // BLOCK_SIZE))]
        rows = [torch.randn(stop, heads, 8, generator=generator) for heads in (4, 2, 2)]
        if num_before:
            before = PagedAttention(cache, [Span(table, 0, num_before)], torch.device("cpu"))
            before(0, *(row[:num_before] for row in rows), **options)
        spans.append(Span(table, num_before, stop))
        trees.append(tree)
        new_rows.append([row[num_before:] for row in rows])
        for node in range(len(tree)):
            branch = [*range(num_before), *(num_before + each for each in path_to(tree, node))]
            expected.append(DenseAttention([len(branch)])(0, *(row[branch] for row in rows), **options)[-1:])
    attend = PagedAttention(cache, spans, torch.device("cpu"), is_exact=is_exact, trees=trees)
    output = attend(0, *(torch.cat(parts) for parts in zip(*new_rows, strict=True)), **options)
    torch.testing.assert_close(output, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_chain_is_a_text():
    tree = TokenTree(7)
    tree.add(0, [1, 2, 3])
    for window in (None, 2):
        mask = tree_mask([tree], [5], 4, 12, window)[0]
        for node in range(4):
            first = 0 if window is None else 5 + node - window + 1
            assert np.flatnonzero(mask[node]).tolist() == list(range(first, 5 + node + 1))


PROMPTS = [[5, 9, 11, 3, 4, 8, 7], [6], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]


def read_prompts(model, prompts, num_slots):
    """An engine that has read the prompts, its runner and sequences, with room for so many nodes."""
    engine = Engine(model, method="autoregressive", block_size=4, num_blocks=60)
    runner = engine._hierarchy._runner
    runner.__init__(model, runner.levels, runner._kv_cache, 16, window=num_slots + 3, max_lag=2)
    ids = [engine.add_request(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True)) for prompt in prompts]
    engine.step()
    sequences = [engine._unfinished[request_id][0] for request_id in ids]
    for sequence in sequences:
        engine._scheduler._block_manager.grow(sequence.block_table, len(sequence.token_ids) + num_slots)
    return engine, runner, sequences


@pytest.mark.parametrize("architecture", ["mistral", "opt", "gemma2"])
def test_nodes_are_scored_and_kept_as_texts(architecture):
    """Logits at all nodes are those of the base for the branch, and so are those behind a path that was kept."""
    base = build_base(architecture)
    engine, runner, sequences = read_prompts(build_heads(base, "random"), PROMPTS, 20)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        trees = []
        for number, sequence in enumerate(sequences):
            tree = TokenTree(sequence.token_ids[-1])
            for parent in torch.randint(0, 19, (3 + 6 * number,), generator=generator).tolist():
                tree.add(parent % len(tree), torch.randint(3, 64, (1,), generator=generator).tolist())
            trees.append(tree)
        runner.advance_trees(0, sequences, trees)
        nodes = [range(len(tree)) for tree in trees]
        logits = runner.score_nodes(sequences, nodes).split([len(tree) for tree in trees])
        for sequence, tree, rows in zip(sequences, trees, logits, strict=True):
            for depth in set(tree.depths):
                nodes = [node for node in range(len(tree)) if tree.depths[node] == depth]
                ids = [sequence.token_ids + tree.ids_before(node) for node in nodes]
                with torch.no_grad():
                    expected = base(torch.tensor(ids)).logits[:, -1]
                torch.testing.assert_close(rows[nodes], expected, rtol=1e-3, atol=1e-3)
        # The deepest path of those that end in the last nodes: seldom one that lies in place.
        ends = [max(range(len(tree)), key=lambda node: (tree.depths[node], node)) for tree in trees]
        runner.keep_paths(sequences, [path_to(tree, end) for tree, end in zip(trees, ends, strict=True)])
        for sequence, tree, end in zip(sequences, trees, ends, strict=True):
            sequence.token_ids += [*tree.ids_before(end), 30]
            assert sequence.num_computed == [len(sequence.token_ids) - 1]
            engine._scheduler._block_manager.grow(sequence.block_table, len(sequence.token_ids) + 20)


def test_states_of_a_path_are_kept_too():
    """The window holds the final states of a kept path by their positions, whatever nodes they were."""
    base = build_base("llama")
    _, runner, (sequence,) = read_prompts(build_heads(base, "random"), PROMPTS[:1], 12)
    tree = TokenTree(sequence.token_ids[-1])
    for ids in ([8, 9], [4, 5, 6, 7], [4, 5, 9, 9]):
        end = tree.add(0, ids)
    runner.advance_trees(0, [sequence], [tree])
    path = path_to(tree, end)
    root = len(sequence.token_ids) - 1
    wanted = runner._windows.final[runner._windows.slots([sequence], [(root, root + len(tree))])][path]
    runner.keep_paths([sequence], [path])
    kept = runner._windows.final[runner._windows.slots([sequence], [(root, root + len(path))])]
    assert torch.equal(kept, wanted)
