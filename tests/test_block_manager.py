"""No block is lost, and none belongs to two."""

from hypothesis import given
from hypothesis import strategies as st

from hispec.infer.block_manager import BlockManager


@given(
    num_blocks=st.integers(1, 20),
    block_size=st.integers(1, 5),
    changes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60),
)
def test_blocks_are_neither_lost_nor_shared(num_blocks, block_size, changes):
    manager = BlockManager(num_blocks, block_size)
    tables = [[] for _ in range(4)]
    for owner, num_tokens in changes:
        table = tables[owner]
        if num_tokens < len(table) * block_size:
            kept = list(table)
            manager.shrink(table, num_tokens)
            assert table == kept[: -(-num_tokens // block_size)]
        elif manager.can_grow(table, num_tokens):
            before = list(table)
            manager.grow(table, num_tokens)
            assert table[: len(before)] == before
            assert len(table) * block_size >= num_tokens
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned))
        assert len(owned) + manager.num_free == num_blocks
        assert set(owned) <= set(range(num_blocks))
    for table in tables:
        manager.shrink(table, 0)
    assert manager.num_free == num_blocks


def test_a_sequence_alone_lies_in_one_piece():
    manager = BlockManager(8, 4)
    first, second = [], []
    manager.grow(first, 8)
    manager.grow(second, 4)
    manager.shrink(first, 0)
    manager.shrink(second, 0)
    manager.grow(first, 32)
    assert first == list(range(8))


def test_growth_beyond_the_pool_is_foreseen():
    manager = BlockManager(2, 4)
    assert manager.can_grow([], 8)
    assert not manager.can_grow([], 9)
