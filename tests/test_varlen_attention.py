"""The paged kernel's call: on a CPU with a stand-in that does what torch documents, on a GPU with the kernel itself."""

import pytest
import torch

from hispec.infer.attention import PagedAttention, Span, build_layout, can_use_varlen
from hispec.infer.kv_cache import KVCache

from .paged_kernel import stand_in

SPANS = [Span([5, 2, 7], 9, 11), Span([0], 0, 3), Span([1, 3, 4, 6], 0, 14), Span([8], 3, 4)]


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
        PagedAttention(cache, SPANS, torch.device("cpu"), layout=layout)(0, *rows, **options)
        for layout in (None, build_layout(SPANS, cache.block_size, torch.device("cpu")))
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
        PagedAttention(cache, SPANS, torch.device("cuda"), layout=layout)(0, *rows, **options)
        for layout in (None, build_layout(SPANS, block_size, torch.device("cuda")))
    ]
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
