"""One product for layers over one input: the same values, the same memory."""

import copy

import pytest
import torch
from torch import nn

from hispec.heads import Backbone, DenseAttention
from hispec.heads.fused_linear import FusedLinear, fuse_linears

from .models import build_base


def make_linears(bias=False):
    return [nn.Linear(8, size, bias=bias) for size in (6, 4, 2)]


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_the_parts_are_the_layers(bias):
    linears = make_linears(bias)
    before = copy.deepcopy(linears)
    parts = FusedLinear(linears).parts()
    for _ in range(2):
        hidden = torch.randn(1, 5, 8)
        for part, linear in zip(parts, before, strict=True):
            torch.testing.assert_close(part(hidden), linear(hidden))
    for linear, old in zip(linears, before, strict=True):
        assert torch.equal(linear.weight, old.weight)
        assert linear.bias is None or torch.equal(linear.bias, old.bias)


@torch.no_grad()
def test_in_16_bits_a_bias_is_rounded_once():
    linears = [linear.bfloat16() for linear in make_linears(bias=True)]
    hidden = (torch.randint(-31, 32, (1, 50, 8)) / 32).bfloat16()
    for linear in linears:
        linear.weight.copy_(torch.randint(-31, 32, linear.weight.shape) / 32)  # sums are exact in any order
    before = copy.deepcopy(linears)
    for part, linear in zip(FusedLinear(linears).parts(), before, strict=True):
        assert torch.equal(part(hidden), linear(hidden))


@torch.no_grad()
def test_biases_are_followed():
    linears = make_linears(bias=True)
    fused = FusedLinear(linears)
    hidden = torch.randn(1, 5, 8)
    linears[1].bias.add_(3)
    torch.testing.assert_close(fused.take(1, hidden), linears[1](hidden))
    for linear in linears:
        linear.to(torch.float64)
    torch.testing.assert_close(fused.take(2, hidden.double()), linears[2](hidden.double()))


@torch.no_grad()
def test_layers_of_which_some_have_a_bias_stay_apart():
    block = nn.Module()
    block.gate_proj, block.up_proj = nn.Linear(8, 12, bias=True), nn.Linear(8, 12, bias=False)
    hidden = torch.randn(1, 5, 8)
    expected = block.gate_proj(hidden), block.up_proj(hidden)
    fuse_linears(block)
    torch.testing.assert_close((block.gate_proj(hidden), block.up_proj(hidden)), expected)


@torch.no_grad()
def test_nothing_is_kept_once_all_parts_were_taken():
    fused = FusedLinear(make_linears())
    hidden = torch.randn(1, 5, 8)
    for index in range(3):
        fused.take(index, hidden)
    assert fused._input is None
    assert fused._outputs == [None] * 3


@torch.no_grad()
def test_two_of_them_share_the_weights_and_follow_the_base():
    linears = make_linears()
    first, second = FusedLinear(linears), FusedLinear(linears)
    assert first._product.weight.data_ptr() == second._product.weight.data_ptr() == linears[0].weight.data_ptr()
    linears[1].weight.zero_()
    for linear in linears:
        linear.to(torch.bfloat16)
    hidden = torch.randn(1, 5, 8, dtype=torch.bfloat16)
    assert all(fused.take(0, hidden).dtype == torch.bfloat16 for fused in (first, second))
    assert not first.take(1, hidden).any()
    assert first._product.weight.data_ptr() == second._product.weight.data_ptr()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 40])
@torch.no_grad()
def test_a_fused_module_says_the_same(bias, num_rows):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=bias), nn.Linear(8, 12, bias=bias)
            self.down_proj = nn.Linear(12, 8, bias=bias)

        def forward(self, hidden):
            return self.down_proj(self.gate_proj(hidden) * self.up_proj(hidden))

    module, hidden = Block(), torch.randn(1, num_rows, 8)
    expected = module(hidden)
    fuse_linears(module)
    assert not list(module.parameters())
    torch.testing.assert_close(module(hidden), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_base_beneath_a_backbone_saves_and_loads(tmp_path, architecture):
    base = build_base(architecture)
    before = copy.deepcopy(base.state_dict())
    backbone = Backbone(base)
    backbone.run_layers(torch.zeros(1, 3, 32), 0, 6, torch.arange(3), DenseAttention([3]))
    base.save_pretrained(tmp_path)
    loaded = type(base).from_pretrained(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())
    assert isinstance(base.model.layers[0].self_attn.q_proj, nn.Linear)
