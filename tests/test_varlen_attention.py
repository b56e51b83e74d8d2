"""The paged kernel's call: on a CPU with a stand-in that does what torch documents, on a GPU with the kernel itself."""

import pytest
import torch

from hispec.infer.attention import PagedAttention, Span, can_use_varlen
from hispec.infer.kv_cache import KVCache

SPANS = [Span([5, 2, 7], 9, 11), Span([0], 0, 3), Span([1, 3, 4, 6], 0, 14), Span([8], 3, 4)]


def stand_in(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table
):
    """`torch.nn.attention.varlen.varlen_attn` by its documentation, sequence by sequence."""
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert cu_seq_k is None
    assert enable_gqa == (query.shape[1] != key.shape[2])
    outputs = []
    for b, (first, last) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        num_queries, num_keys = last - first, int(seqused_k[b])
        assert num_queries <= max_q
        assert num_keys <= max_k
        keys, values = (
            pool[block_table[b].long()].flatten(0, 1)[:num_keys].repeat_interleave(query.shape[1] // pool.shape[2], 1)
            for pool in (key, value)
        )
        behind = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        left, right = window_size
        mask = (behind >= -right) & ((behind <= left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", query[first:last], keys) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


def build(dtype, device, block_size=4, head_dim=8):
    cache = KVCache(1, 9, block_size, 2, head_dim, dtype, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    num_rows = sum(span.stop - span.start for span in SPANS)
    rows = [torch.randn(num_rows, heads, head_dim, generator=generator).to(device, dtype) for heads in (6, 2, 2)]
    return cache, rows


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_call_says_what_scaled_dot_products_say(monkeypatch, window, softcap):
    calls = []
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn",
        lambda *arguments, **options: calls.append(1) or stand_in(*arguments, **options),
    )
    cache, rows = build(torch.float32, "cpu")
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    outputs = [
        PagedAttention(cache, SPANS, torch.device("cpu"), by_varlen=by_varlen)(0, *rows, **options)
        for by_varlen in (False, True)
    ]
    torch.testing.assert_close(*outputs)
    assert len(calls) == (softcap is None)


def test_a_cpu_does_not_use_it():
    assert not can_use_varlen(build(torch.bfloat16, "cpu")[0], 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_says_what_scaled_dot_products_say(block_size, head_dim, window):
    cache, rows = build(torch.bfloat16, "cuda", block_size, head_dim)
    if not can_use_varlen(cache, 6):
        pytest.skip(f"this GPU's kernel does not take blocks of {block_size}")
    options = {"scaling": 0.1, "window": window, "softcap": None}
    outputs = [
        PagedAttention(cache, SPANS, torch.device("cuda"), by_varlen=by_varlen)(0, *rows, **options)
        for by_varlen in (False, True)
    ]
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
