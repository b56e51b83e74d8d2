"""One product for layers over one input: the same values, the same memory."""

import copy

import pytest
import torch
from torch import nn

from hispec.heads import Backbone, DenseAttention
from hispec.heads.fused_linear import FusedLinear, fuse_linears

from .models import build_base


def make_linears():
    return [nn.Linear(8, size, bias=False) for size in (6, 4, 2)]


@torch.no_grad()
def test_the_parts_are_the_layers():
    linears = make_linears()
    before = copy.deepcopy(linears)
    parts = FusedLinear(linears).parts()
    for _ in range(2):
        hidden = torch.randn(1, 5, 8)
        for part, linear in zip(parts, before, strict=True):
            torch.testing.assert_close(part(hidden), linear(hidden))
    for linear, old in zip(linears, before, strict=True):
        assert torch.equal(linear.weight, old.weight)


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


def test_a_base_beneath_a_backbone_saves_and_loads(tmp_path):
    base = build_base("llama")
    before = copy.deepcopy(base.state_dict())
    backbone = Backbone(base)
    backbone.run_layers(torch.zeros(1, 3, 32), 0, 6, torch.arange(3), DenseAttention([3]))
    base.save_pretrained(tmp_path)
    loaded = type(base).from_pretrained(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())
    assert isinstance(base.model.layers[0].self_attn.q_proj, nn.Linear)
