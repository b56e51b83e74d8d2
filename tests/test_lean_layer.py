"""Lean layers are the library's own, to the bit."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from hispec.heads import Backbone, DenseAttention, EarlyExitModel
from hispec.heads.lean_layer import LeanLayer

LEAN = ("llama", "mistral", "qwen2", "qwen2-window", "qwen3")


def both_ways(backbone, lengths=(7, 12)):
    """What the lean layers make of two sequences, and what the library's make of them."""
    num_rows = sum(lengths)
    token_ids = torch.randint(3, 64, (num_rows,), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in lengths])
    outputs = []
    with torch.inference_mode():
        for layers in (backbone._runs, backbone.layers):
            backbone._runs = layers
            hidden = backbone.embed(token_ids, positions)
            outputs.append(backbone.run_layers(hidden, 0, 6, positions, DenseAttention(list(lengths))))
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("architecture", LEAN)
def test_lean_layers_give_the_same_bits(make_base, architecture, packs, dtype):
    backbone = Backbone(make_base(architecture).to(dtype))
    assert all(isinstance(layer, LeanLayer) for layer in backbone._runs)
    if packs:
        for product in backbone.products():
            product.pack()
    lean, expected = both_ways(backbone)
    assert torch.equal(lean, expected)


def test_every_other_architecture_runs_by_the_librarys_layers(any_base):
    backbone = Backbone(any_base)
    is_lean = any_base.config.model_type in ("llama", "mistral", "qwen2", "qwen3")
    assert all(isinstance(layer, LeanLayer) == is_lean for layer in backbone._runs)


@pytest.mark.parametrize("architecture", ["llama", "qwen2-window"])
def test_each_layer_attends_as_the_librarys(make_base, architecture):
    backbone = Backbone(make_base(architecture))
    asked = []

    def attend(kv_layer, query, key, value, **options):
        asked.append((kv_layer, options))
        return query

    positions = torch.arange(3)
    hidden = backbone.embed(torch.tensor([5, 6, 7]), positions)
    for layers in (backbone._runs, backbone.layers):
        backbone._runs = layers
        backbone.run_layers(hidden, 0, 6, positions, attend)
    assert asked[:6] == asked[6:]


@pytest.mark.parametrize("change", ["norm", "mlp", "rotary"])
def test_a_library_that_computes_something_else_is_followed(make_base, monkeypatch, change):
    base = make_base("llama")
    if change == "norm":
        forward = modeling_llama.LlamaRMSNorm.forward
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, hidden: forward(self, hidden) * 1.1)
    elif change == "mlp":
        forward = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, hidden: forward(self, hidden) + 0.1)
    else:
        turn = modeling_llama.apply_rotary_pos_emb
        monkeypatch.setattr(
            modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, k, cos.flip(-1), sin)
        )
    backbone = Backbone(base)
    assert backbone._runs == backbone.layers
    token_ids, positions = torch.arange(3, 15), torch.arange(12)
    hidden = backbone.run_layers(backbone.embed(token_ids, positions), 0, 6, positions, DenseAttention([12]))
    logits = backbone.logits(backbone.final_norm(hidden))
    torch.testing.assert_close(logits, base(token_ids.unsqueeze(0)).logits, rtol=1e-4, atol=1e-4)


def test_a_blocks_layer_is_lean_and_follows_new_weights(make_base):
    model = EarlyExitModel.from_base(make_base("qwen3"), (2,), head="block")
    (head,) = model.exit_heads
    assert isinstance(head._lean[0], LeanLayer)
    with torch.no_grad():
        for parameter in head.block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    hidden, positions = torch.randn(1, 6, 32), torch.arange(6)
    options = {"context": None, "positions": positions, "attend": DenseAttention([6])}
    with torch.no_grad():
        lean = head(hidden, **options)
    torch.testing.assert_close(lean, head(hidden, **options), rtol=1e-5, atol=1e-5)
    assert not torch.equal(lean, EarlyExitModel.from_base(make_base("qwen3"), (2,)).exit_heads[0](hidden, **options))
