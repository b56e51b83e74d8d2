"""Attention over scattered blocks and ragged spans is attention over each sequence by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.heads import DenseAttention, attention, capped_attention
from hispec.infer.attention import PagedAttention, Span
from hispec.infer.kv_cache import KVCache

BLOCK_SIZE, NUM_BLOCKS = 4, 64


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 20)), min_size=1, max_size=5),
    window=st.sampled_from([None, 3, 40]),
    softcap=st.sampled_from([None, 0.5]),
    is_scattered=st.booleans(),
)
def test_it_equals_dense_attention(shapes, window, softcap, is_scattered):
    generator = torch.Generator().manual_seed(len(shapes))
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist() if is_scattered else list(range(NUM_BLOCKS))
    cache = KVCache(1, NUM_BLOCKS, BLOCK_SIZE, 2, 8, torch.float32, torch.device("cpu"))
    for pool in (*cache.keys, *cache.values):
        pool.fill_(torch.nan)
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    spans, new_rows, expected = [], [], []
    for num_before, num_new in shapes:
        stop = num_before + num_new
        table = [order.pop() for _ in range(-(-stop // BLOCK_SIZE))]
        rows = [torch.randn(stop, heads, 8, generator=generator) for heads in (4, 2, 2)]
        if num_before:
            before = PagedAttention(cache, [Span(table, 0, num_before)], torch.device("cpu"))
            before(0, *(row[:num_before] for row in rows), **options)
        spans.append(Span(table, num_before, stop))
        new_rows.append([row[num_before:] for row in rows])
        expected.append(DenseAttention([stop])(0, *rows, **options)[num_before:])
    attend = PagedAttention(cache, spans, torch.device("cpu"))
    output = attend(0, *(torch.cat(parts) for parts in zip(*new_rows, strict=True)), **options)
    torch.testing.assert_close(output, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 16, 17, 64])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_dense_attention_has_gradients(length, softcap):
    query = torch.randn(length, 4, 8, requires_grad=True)
    key = torch.randn(length, 2, 8)
    DenseAttention([length])(0, query, key, key, scaling=0.3, window=None, softcap=softcap).sum().backward()
    assert query.grad is not None


def test_many_capped_queries_are_scored_in_parts(monkeypatch):
    query, key, value = (torch.randn(2, 3, 10, 8) for _ in range(3))
    mask = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    whole = capped_attention(query, key, value, mask, scaling=0.3, softcap=0.5)
    monkeypatch.setattr(attention, "MAX_CAPPED_QUERIES", 4)
    torch.testing.assert_close(capped_attention(query, key, value, mask, scaling=0.3, softcap=0.5), whole)
