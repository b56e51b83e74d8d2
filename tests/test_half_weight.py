"""A float32 weight in 16 bits multiplies as the weight itself."""

import pytest
import torch
from torch.nn import functional as F

from hispec.heads import find_kernels
from hispec.heads.fused_linear import FusedPart
from hispec.heads.half_weight import HalfWeight, can_halve, half_weight
from hispec.heads.product import Product
from hispec.heads.row_invariance import TiledProduct
from hispec.infer import Engine, SamplingParams

from .models import build_base, build_heads, reference

pytestmark = pytest.mark.skipif(not can_halve(), reason="this machine has no float32 product with float16 weights")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
ROW_COUNTS = [1, 2, 3, 4, 7, 8, 16, 33, 64]


def make(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def released(*shape, dtype=torch.bfloat16, seed=1):
    """A weight as a checkpoint of 16 bits has it, in float32."""
    return (make(*shape, seed=seed) * 0.05).to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("leading", [(), (1,)])
@torch.no_grad()
def test_a_weight_of_16_bits_is_multiplied_exactly(dtype, has_bias, leading):
    weight, bias = released(256, 192, dtype=dtype), make(256, seed=2) if has_bias else None
    product = Product(weight, bias)
    product.pack()
    assert product.packing == "half"
    for num_rows in ROW_COUNTS:
        hidden = make(*leading, num_rows, 192)
        expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        output = product(hidden)
        assert output.shape == expected.shape
        # As near as float32 comes by the usual call.
        error = (output - expected).abs().max()
        assert error <= 4 * (F.linear(hidden, weight, bias) - expected).abs().max()


@torch.no_grad()
def test_a_row_is_the_same_among_any_number_of_rows():
    product = Product(released(256, 192))
    product.pack()
    hidden = make(64, 192)
    whole = product(hidden)
    for num_rows in ROW_COUNTS:
        assert torch.equal(product(hidden[:num_rows].contiguous()), whole[:num_rows])


@torch.no_grad()
def test_a_weight_of_more_bits_is_rounded_only_where_asked():
    weight, hidden = make(64, 48) * 0.05, make(3, 48)
    assert half_weight(weight, rounds=False) is None
    one = weight.bfloat16().float()
    one[5, 7] = 0.1  # a single value
    assert half_weight(one, rounds=False) is None
    rounded = half_weight(weight, rounds=True)
    kernels = find_kernels()
    dtype = torch.bfloat16 if kernels and kernels.uses_tiles else torch.float16
    torch.testing.assert_close(rounded(hidden), F.linear(hidden, weight), rtol=0, atol=torch.finfo(dtype).eps)
    torch.testing.assert_close(rounded(hidden), F.linear(hidden, weight.to(dtype).float()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-6, 1.0, 1e5, 1e30])
@torch.no_grad()
def test_any_magnitude_is_held(magnitude):
    weight, hidden = (make(32, 48) * magnitude).bfloat16().float(), make(3, 48)
    held = half_weight(weight, rounds=False)
    torch.testing.assert_close(held(hidden), F.linear(hidden, weight), rtol=1e-5, atol=1e-5 * magnitude)


@torch.no_grad()
def test_values_that_any_sum_loses_may_be_lost_but_no_row_of_them():
    weight = torch.full((4, 8), 0.5 + 2.0**-10)  # more than bfloat16 holds
    weight[0, 0] = 2.0**-60
    assert half_weight(weight, rounds=False) is not None
    weight[1] = 2.0**-60
    assert half_weight(weight, rounds=False) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_is_not_held(value):
    weight = torch.full((4, 8), 0.5)
    weight[2, 3] = value
    assert half_weight(weight, rounds=True) is None


@torch.no_grad()
def test_a_weight_of_zeros_and_one_without_rows():
    assert not half_weight(torch.zeros(4, 8), rounds=False)(make(2, 8)).any()
    product = Product(torch.zeros(0, 8))
    product.pack()
    assert product(make(2, 8)).shape == (2, 0)


@torch.no_grad()
def test_the_copy_follows_its_weight_out_of_16_bits_and_back():
    parameter, hidden = torch.nn.Parameter(released(6, 5)), make(2, 5)
    product = Product(parameter)
    product.pack()
    for weight, is_half in ((make(6, 5, seed=3), False), (released(6, 5, seed=4), True)):
        parameter.copy_(weight)
        product(make(20, 5))  # so many rows are multiplied by the packed copy of any kind
        torch.testing.assert_close(product(hidden), F.linear(hidden, weight))
        assert (product.packing == "half") == is_half


@torch.no_grad()
def test_a_bias_is_read_anew_and_may_be_large_beside_a_small_weight():
    bias = torch.nn.Parameter(torch.full((6,), 2.0**20))
    product = Product(torch.full((6, 5), 2.0**-100), bias)
    product.pack()
    assert product.packing == "half"
    assert torch.equal(product(make(2, 5)), torch.full((2, 6), 2.0**20))
    bias.mul_(2)
    assert torch.equal(product(make(2, 5)), torch.full((2, 6), 2.0**21))


@torch.no_grad()
def test_a_row_may_come_without_a_number():
    product = Product(released(6, 5))
    product.pack()
    hidden = make(5)
    torch.testing.assert_close(product(hidden), F.linear(hidden, product.weight))


def test_another_quantized_engine_takes_the_copy_away(without_kernels):
    product, hidden = Product(released(6, 5)), make(3, 5)
    product.pack()
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "onednn"
        product.pack()
    finally:
        torch.backends.quantized.engine = before
    assert product.is_packed
    assert product.packing != "half"
    with torch.no_grad():
        torch.testing.assert_close(product(hidden), F.linear(hidden, product.weight))


def test_an_exact_engine_tries_the_products_of_other_weights(monkeypatch):
    base = build_base("llama").bfloat16().float()
    engine = Engine(build_heads(base, "random"), method="single-layer", num_blocks=32, pack_weights=True, exact=True)
    params = SamplingParams(max_new_tokens=8)
    assert list(engine.generate(PROMPTS[:1], params)[0].token_ids) == reference(base, PROMPTS[0], 8)
    with torch.no_grad():
        base.lm_head.weight.mul_(1.1)
        base.model.layers[0].self_attn.q_proj.weight.mul_(1.1)
    assert list(engine.generate(PROMPTS[:1], params)[0].token_ids) == reference(base, PROMPTS[0], 8)
    assert engine.model.backbone._lm_head_product.packing != "half"
    with torch.no_grad():
        base.lm_head.weight.mul_(1.1)
    monkeypatch.setattr(TiledProduct, "is_invariant", lambda self: self._product.packing == "half")
    for _ in range(2):
        with pytest.raises(ValueError, match="depends on the number of rows"):
            engine.add_request(PROMPTS[0], params)


@pytest.mark.parametrize(("method", "exact"), [("autoregressive", False), ("hispec", False), ("single-layer", True)])
@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_the_answers_are_those_of_generate(architecture, method, exact):
    base = build_base(architecture).bfloat16().float()
    model = build_heads(base, "random")
    engine = Engine(model, method=method, num_blocks=32, pack_weights=True, exact=exact)
    assert model.backbone._lm_head_product.packing == "half"
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert list(completion.token_ids) == reference(base, prompt, 20)


@torch.no_grad()
def test_exact_mode_tries_the_kernel_that_it_uses(monkeypatch, without_kernels):
    product = Product(released(64, 48))
    product.pack()
    assert TiledProduct(product).is_invariant()
    by_half = HalfWeight.__call__
    monkeypatch.setattr(HalfWeight, "__call__", lambda self, hidden: by_half(self, hidden) * (1 + 2**-20 * len(hidden)))
    assert not TiledProduct(product).is_invariant()


@torch.no_grad()
def test_the_rows_that_draft_are_rounded_and_nothing_else_is():
    model = build_heads(build_base("llama"), "random", head=("block", "mlp"), draft_vocab_size=24)
    model.pack_weights()
    assert model.backbone._lm_head_product.packing != "half"
    assert not any(part.fused._product.packing == "half" for part in _fused_parts(model.backbone.layers))
    heads = model.exit_heads
    assert not any(part.fused._product.packing == "half" for part in _fused_parts([heads[0]._blocks[1]]))
    assert heads[1]._by_mlp.packing != "half"
    assert all(rows.packing == "half" for rows in model._rows)
    state = make(1, 5, model.backbone.hidden_size)
    expected = model.backbone.logits(state)[..., heads[0].draft_vocab_ids]
    torch.testing.assert_close(model.exit_logits(0, state), expected, rtol=0, atol=3e-2)


def _fused_parts(modules):
    parts = [part for top in modules for module in top.modules() for part in vars(module).values()]
    return [part for part in parts if isinstance(part, FusedPart)]
