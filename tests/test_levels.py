"""Levels: which of a model's exits serve a method."""

import pytest

from hispec.checkpoints import load_adapter, save_adapter
from hispec.infer import Engine, SamplingParams
from hispec.infer import engine as engine_module
from hispec.infer.flags import build_parser, engine_options
from hispec.infer.levels import build_levels

from .models import build_heads, reference

KINDS = ("block", "mlp", "block", "shared")


@pytest.fixture(scope="module")
def model(base):
    return build_heads(base, "random", (1, 2, 4, 5), head=KINDS)


def bounds(model, method, exit_layers=None):
    return [(level.start, level.stop, level.head) for level in build_levels(model, method, exit_layers)]


def test_the_shallowest_exits_serve_unless_others_are_named(model):
    assert bounds(model, "hispec") == [(0, 1, 0), (1, 2, 1), (2, 6, None)]
    assert bounds(model, "single-layer") == [(0, 1, 0), (1, 6, None)]
    assert bounds(model, "hispec", (2, 5)) == [(0, 2, 1), (2, 5, 3), (5, 6, None)]
    assert bounds(model, "single-layer", [4]) == [(0, 4, 2), (4, 6, None)]
    assert bounds(model, "autoregressive", ()) == [(0, 6, None)]


@pytest.mark.parametrize(
    ("method", "exit_layers", "message"),
    [
        ("hispec", (1, 3), "exit layer 3 has no head; the model has exits at 1,2,4,5"),
        ("hispec", (1, 2, 4), "exit layers 1,2,4 are 3, but method 'hispec' takes 2"),
        ("single-layer", (1, 2), "takes 1"),
        ("autoregressive", (1,), "takes 0"),
        ("hispec", (4, 2), "not distinct and rising"),
        ("hispec", (2, 2), "not distinct and rising"),
    ],
)
def test_exits_that_cannot_serve(model, method, exit_layers, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, method=method, exit_layers=exit_layers, num_blocks=20)


def test_an_adapter_of_four_heads_loads_and_a_choice_of_them_is_lossless(base, model, tmp_path):
    save_adapter(model, tmp_path / "heads")
    loaded = load_adapter(tmp_path / "heads", base=base)
    prompts = [[5, 6, 7], [9]]
    expected = [reference(base, prompt, 16) for prompt in prompts]
    for exit_layers in ((2, 5), (1, 4), (4, 5), (2,), (5,)):
        engine = Engine.from_base(base, adapter=tmp_path / "heads", exit_layers=exit_layers, num_blocks=40)
        assert engine.config.method == ("single-layer", "hispec")[len(exit_layers) - 1]
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=16))
        assert [completion.token_ids for completion in completions] == expected
        passes = engine.stats.levels["draft"]
        block = KINDS[model.exit_layers.index(exit_layers[0])] == "block"
        assert passes.num_layer_passes >= passes.num_rounds * (exit_layers[0] + block)
    assert loaded.exit_layers == (1, 2, 4, 5)


def test_the_heads_that_are_named_are_those_that_draft(base):
    """Perfect heads at 4 and 5 of a base whose later layers do nothing, wrong ones before."""
    model = build_heads(base, "good", (1, 2, 4, 5), head="shared")
    for head in model.heads[:2]:
        head.register_forward_hook(lambda *arguments: -arguments[-1])
    params = SamplingParams(max_new_tokens=24)
    rates = {}
    for exit_layers in ((1,), (5,)):
        engine = Engine(model, method="single-layer", exit_layers=exit_layers, num_blocks=40)
        engine.generate([[5, 6, 7]], params)
        rates[exit_layers] = engine.stats.levels["target"].acceptance_rate
    assert rates[1,] == 0 < rates[5,]


def test_the_flag_reaches_the_engine(capsys):
    for flag in ("--exit-layers", "--exit_layers"):
        assert engine_options(build_parser().parse_args([flag, "2,5"]))["exit_layers"] == (2, 5)
    assert "exit_layers" not in engine_options(build_parser().parse_args([]))
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--exit-layers", "two"])
    assert "write the adapter's" in capsys.readouterr().err


def test_an_alias_with_shared_heads_needs_no_adapter(make_base, monkeypatch):
    base = make_base("llama", num_hidden_layers=10)
    monkeypatch.setattr(engine_module, "load_base", lambda *_, **__: (base, None))
    engine = Engine.from_pretrained("layerskip-llama2", num_blocks=20)
    assert [(head.config.exit_layer, head.config.kind) for head in engine.model.exit_heads] == [
        (4, "shared"),
        (8, "shared"),
    ]
    assert engine.config.method == "hispec"
    assert Engine.from_pretrained("layerskip-llama2", exit_layers=[4], num_blocks=20).config.method == "single-layer"
    ids = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=12))[0].token_ids
    assert ids == reference(base, [5, 6, 7], 12)
