"""The backbone's parts, put together, are the base's own forward."""

import copy
import itertools

import pytest
import torch
from transformers import Gemma3Config

from hispec.heads import Backbone, DenseAttention, EarlyExitModel


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 3, 6), (0, 0, 5, 6)])
def test_ranges_of_layers_equal_the_forward(any_base, cuts):
    backbone = Backbone(any_base)
    token_ids = torch.randint(3, 64, (21,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(21)
    attend = DenseAttention([21])
    hidden = backbone.embed(token_ids, positions)
    for start, stop in itertools.pairwise(cuts):
        hidden = backbone.run_layers(hidden, start, stop, positions, attend)
    logits = backbone.logits(backbone.final_norm(hidden))
    torch.testing.assert_close(logits, any_base(token_ids.unsqueeze(0)).logits, rtol=1e-4, atol=1e-4)


def test_packed_weights_equal_the_forward(any_base):
    backbone = Backbone(any_base)
    for product in backbone.products():
        product.pack()
    token_ids, positions = torch.arange(3, 15), torch.arange(12)
    with torch.inference_mode():
        hidden = backbone.run_layers(backbone.embed(token_ids, positions), 0, 6, positions, DenseAttention([12]))
        logits = backbone.logits(backbone.final_norm(hidden))
    torch.testing.assert_close(logits, any_base(token_ids.unsqueeze(0)).logits, rtol=1e-4, atol=1e-4)


def test_sequences_side_by_side_do_not_see_each_other(any_base):
    backbone = Backbone(any_base)
    token_ids = torch.randint(3, 64, (17,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(12)])
    hidden = backbone.embed(token_ids, positions)
    hidden = backbone.run_layers(hidden, 0, 6, positions, DenseAttention([5, 12]))
    logits = backbone.logits(backbone.final_norm(hidden))[0]
    torch.testing.assert_close(logits[:5], any_base(token_ids[None, :5]).logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[5:], any_base(token_ids[None, 5:]).logits[0], rtol=1e-4, atol=1e-4)


def test_hidden_states_are_those_of_the_base(any_base):
    backbone = Backbone(any_base)
    token_ids = torch.arange(3, 15)
    positions = torch.arange(12)
    states = any_base(token_ids.unsqueeze(0), output_hidden_states=True).hidden_states
    embedded = backbone.embed(token_ids, positions)
    torch.testing.assert_close(embedded, states[0])
    hidden = backbone.run_layers(embedded, 0, 3, positions, DenseAttention([12]))
    torch.testing.assert_close(hidden, states[3], rtol=1e-4, atol=1e-4)


def test_rows_of_the_lm_head_are_its_logits(any_base):
    backbone = Backbone(any_base)
    state = torch.randn(4, backbone.hidden_size)
    ids = torch.tensor([3, 9, 60])
    torch.testing.assert_close(backbone.logits(state, backbone.lm_head_rows(ids)), backbone.logits(state)[:, ids])


def test_the_base_runs_on_as_ever(any_base):
    token_ids = torch.arange(3, 15).unsqueeze(0)
    before = any_base(token_ids).logits
    implementation = any_base.config._attn_implementation
    weights = copy.deepcopy(any_base.state_dict())
    backbone = Backbone(any_base)
    backbone.run_layers(backbone.embed(token_ids[0], torch.arange(12)), 0, 6, torch.arange(12), DenseAttention([12]))
    assert any_base.config._attn_implementation == implementation
    assert torch.equal(any_base(token_ids).logits, before)
    assert all(torch.equal(weights[name], tensor) for name, tensor in any_base.state_dict().items())


def test_twins_follow_the_base_to_another_dtype(make_base):
    base = make_base("llama")
    backbone = Backbone(base)
    base.to(torch.bfloat16)
    hidden = backbone.embed(torch.tensor([5]), torch.tensor([0]))
    assert backbone.run_layers(hidden, 0, 6, torch.tensor([0]), DenseAttention([1])).dtype == torch.bfloat16


def test_an_unknown_architecture_is_refused(base):
    other = copy.copy(base)
    other.config = copy.deepcopy(base.config)
    other.config.model_type = "mamba"
    with pytest.raises(ValueError, match=r"'mamba' is not supported; supported are llama"):
        Backbone(other)


def test_a_base_that_is_refused_is_refused_before_its_config_is_read(base):
    other = copy.copy(base)
    other.config = Gemma3Config()
    with pytest.raises(ValueError, match=r"'gemma3' is not supported.*gemma3_text"):
        EarlyExitModel.from_base(other, (2,))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("gemma2", {"use_bidirectional_attention": True}), ("gpt2", {"add_cross_attention": True})],
)
def test_attention_that_looks_ahead_or_elsewhere_is_refused(make_base, architecture, changes):
    with pytest.raises(ValueError, match="attention that is not causal"):
        Backbone(make_base(architecture, **changes))


def test_the_shapes_of_the_cache_are_those_of_the_layers(any_base):
    backbone = Backbone(any_base)
    shapes = []

    def attend(kv_layer, query, key, value, **_):
        shapes.append((key.shape, value.shape))
        return query

    backbone.run_layers(backbone.embed(torch.tensor([5]), torch.tensor([0])), 0, 6, torch.tensor([0]), attend)
    assert set(shapes) == {((1, backbone.num_kv_heads, backbone.head_dim),) * 2}
    assert backbone.max_context == 256


def test_an_unknown_argument_of_a_layer_is_not_ignored(base):
    backbone = Backbone(base)
    with pytest.raises(TypeError, match="s_aux"):
        backbone.layers[0](
            torch.zeros(1, 1, 32),
            position_embeddings=backbone._rotary(torch.zeros(1, 1, 32), torch.tensor([0]), backbone.layers[0]),
            attend=None,
            kv_layer=0,
            s_aux=torch.zeros(4),
        )
