"""Heads: what they start as, what they share, what they refuse."""

import copy

import pytest
import torch

from hispec.heads import DenseAttention, EarlyExitModel, ExitHeadConfig, context_positions

from .models import build_heads

IDS = torch.arange(3, 15)
POSITIONS = torch.arange(12)
ATTEND = DenseAttention([12])


def states(model, exit_layer):
    backbone = model.backbone
    hidden = backbone.embed(IDS, POSITIONS)
    at_exit = backbone.run_layers(hidden, 0, exit_layer, POSITIONS, ATTEND)
    return at_exit, backbone.run_layers(at_exit, exit_layer, backbone.num_layers, POSITIONS, ATTEND)


@pytest.mark.parametrize("kind", ["shared", "norm", "mlp"])
def test_an_untrained_head_is_the_raw_exit(any_base, kind):
    model = EarlyExitModel.from_base(any_base, (3,), head=kind, committed_context=kind != "shared")
    at_exit, final = states(model, 3)
    context = torch.randn_like(at_exit)
    state = model.heads[0](at_exit, context, POSITIONS, ATTEND)
    expected = model.backbone.logits(model.backbone.final_norm(at_exit))
    if any_base.config.model_type == "opt" and model.backbone.parts.final_norm is None and kind != "shared":
        expected = model.backbone.logits(torch.nn.functional.layer_norm(at_exit, at_exit.shape[-1:]))
    torch.testing.assert_close(model.exit_logits(0, state), expected, rtol=1e-4, atol=1e-4)
    assert final.shape == at_exit.shape


@pytest.mark.parametrize("kind", ["block", "lora"])
@pytest.mark.parametrize("in_training", [True, False])
def test_an_untrained_block_is_a_layer_of_the_base(any_base, kind, in_training):
    model = EarlyExitModel.from_base(any_base, (3,), head=kind, committed_context=True)
    at_exit, _ = states(model, 3)
    with torch.set_grad_enabled(in_training):
        state = model.heads[0](at_exit, torch.randn_like(at_exit), POSITIONS, ATTEND)
    expected = model.heads[0].norm(model.backbone.run_layers(at_exit, 3, 4, POSITIONS, ATTEND))
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["shared", "norm", "mlp", "block"])
def test_a_draft_vocabulary_scores_those_tokens(any_base, kind):
    ids = torch.tensor([60, 3, 9])
    model = EarlyExitModel.from_base(any_base, (2,), head=kind, draft_vocab_ids=ids)
    full = EarlyExitModel.from_base(any_base, (2,), head=kind)
    assert model.heads[0].draft_vocab_ids.tolist() == [3, 9, 60]
    at_exit, _ = states(model, 2)
    state = model.heads[0](at_exit, None, POSITIONS, ATTEND)
    torch.testing.assert_close(
        model.exit_logits(0, state),
        full.exit_logits(0, full.heads[0](at_exit, None, POSITIONS, ATTEND))[..., [3, 9, 60]],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_learns(any_base, dtype):
    """As in training: a float32 head on the states of a base of any type."""
    model = EarlyExitModel.from_base(
        copy.deepcopy(any_base).to(dtype), (3,), draft_vocab_size=48, committed_context=True
    )
    head = model.heads[0].float()
    with torch.no_grad():
        at_exit, final = states(model, 3)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            state = head(at_exit, model.backbone.final_norm(final), POSITIONS, ATTEND)
        logits = model.exit_logits(0, state.to(dtype)).float()
        loss = torch.nn.functional.cross_entropy(logits[0], IDS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not [name for name, parameter in head.named_parameters() if parameter.grad is None]
    assert all(parameter.grad is None for parameter in model.base.parameters())


@pytest.mark.parametrize("kind", ["norm", "mlp", "block", "lora"])
def test_heads_hold_no_tensor_of_the_base(any_base, kind):
    model = build_heads(any_base, "good", head=kind, committed_context=True, draft_vocab_size=8)
    of_base = {tensor.data_ptr() for tensor in any_base.state_dict().values()}
    assert not of_base & {tensor.data_ptr() for tensor in model.heads.state_dict().values()}
    assert not any("lm_head" in name or "embed" in name for name in model.heads.state_dict())
    assert all(parameter.requires_grad for parameter in model.heads.parameters())
    assert not any(parameter.requires_grad for parameter in any_base.parameters())


def test_a_lora_head_trained_is_the_layer_with_its_deltas_added(any_base):
    """In inference, over fused products, as in training; and as a block whose weights have the deltas in them."""
    model = build_heads(any_base, "random", (3,), head="lora", lora_rank=4)
    head, at_exit = model.heads[0], states(model, 3)[0]
    with torch.inference_mode():
        fast = head(at_exit, None, POSITIONS, ATTEND)
        model.pack_weights()
        packed = head(at_exit, None, POSITIONS, ATTEND)
    torch.testing.assert_close(fast, head(at_exit, None, POSITIONS, ATTEND), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast, packed, rtol=1e-4, atol=1e-4)
    block = EarlyExitModel.from_base(any_base, (3,), head="block").heads[0]
    with torch.no_grad():
        block.norm.load_state_dict(head.norm.state_dict())
        for path, delta in head.deltas.items():
            linear, change = block.block.get_submodule(path.replace("/", ".")), delta.up @ delta.down
            linear.weight.add_(change if isinstance(linear, torch.nn.Linear) else change.t())
    torch.testing.assert_close(fast, block(at_exit, None, POSITIONS, ATTEND), rtol=1e-3, atol=1e-3)


def test_a_lora_head_holds_deltas_and_a_norm(base):
    head = EarlyExitModel.from_base(base, (2,), head="lora").heads[0]
    of_deltas = [name for name in head.state_dict() if name.startswith("deltas.")]
    assert set(head.state_dict()) == {*of_deltas, "norm.weight"}
    assert len(of_deltas) == 2 * 7
    assert {tuple(head.deltas[name].up.shape) for name in ("self_attn/k_proj", "mlp/up_proj")} == {(16, 16), (64, 16)}


def test_a_context_changes_the_output_once_it_has_weights(base):
    model = build_heads(base, "random", committed_context=True)
    at_exit, _ = states(model, 2)
    first, second = (model.heads[0](at_exit, torch.randn_like(at_exit), POSITIONS, ATTEND) for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-2)


def test_the_context_is_the_position_before_or_the_newest_known():
    found = context_positions(torch.tensor([0, 1, 4, 5, 6, 9]), torch.tensor([9, 9, 4, 4, 4, 4]))
    assert found.tolist() == [-1, 0, 3, 4, 4, 4]


def test_moving_the_model_moves_the_rows_of_the_lm_head(make_base):
    model = EarlyExitModel.from_base(make_base("llama"), (2,), head="norm", draft_vocab_size=8)
    model.to(torch.bfloat16)
    assert model.exit_logits(0, torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("exit_layers", "options", "message"),
    [
        ((6,), {}, "exit layer 6 is out of range: the base has 6 layers, so 0 to 5"),
        ((-1,), {}, "exit layer -1 is out of range"),
        ((4, 2), {}, "exit layers 4,2 are not in rising order; write 2,4"),
        ((2, 2), {}, "exit layers 2,2 name a layer twice"),
        ((), {}, "no exit layers are given"),
        ((0,), {}, "exit layer 0 needs a head with committed context"),
        ((2,), {"head": "magic"}, "head kind 'magic' is unknown; choose one of shared, norm, mlp, block, lora"),
        ((2,), {"head": "shared", "committed_context": True}, "a 'shared' head has no weights"),
        ((2,), {"draft_vocab_size": 65}, "draft_vocab_size is 65, but the base has only 64"),
        ((2,), {"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ((2,), {"head": "lora", "lora_rank": 0}, "lora_rank is 0"),
    ],
)
def test_what_no_model_can_be(base, exit_layers, options, message):
    with pytest.raises(ValueError, match=message):
        EarlyExitModel.from_base(base, exit_layers, **options)


def test_a_config_is_checked_by_itself():
    with pytest.raises(ValueError, match="exit layer 0 needs"):
        ExitHeadConfig(exit_layer=0)
