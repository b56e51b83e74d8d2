"""Bases that carry adapters of peft, or quantised layers: the heads follow, and the output is still the base's own."""

import copy
import warnings

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from hispec.checkpoints import fingerprint, load_adapter, save_adapter
from hispec.heads import EarlyExitModel
from hispec.heads.stand_in import plain_copy
from hispec.infer import Engine, SamplingParams

from .models import build_base, build_heads, reference

GENERATOR = torch.Generator().manual_seed(7)
PROMPTS = [torch.randint(3, 64, (length,), generator=GENERATOR).tolist() for length in (1, 9)]
NUM_TOKENS = 8
LINEARS = ["q_proj", "v_proj", "up_proj", "down_proj", "fc1", "c_attn", "c_fc", "dense_4h_to_h", "query_key_value"]
LORA = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}
ADAPTERS = {
    "lora": LoraConfig(target_modules=LINEARS, **LORA),
    "dora": LoraConfig(target_modules=LINEARS, use_dora=True, **LORA),
    "lora everywhere": LoraConfig(target_modules=[*LINEARS, "lm_head", "embed_tokens", "wte", "embed_in"], **LORA),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
}


class Int8Linear(nn.Linear):
    """Weights of 8 bits with a scale for each output, as quantising libraries keep them."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale.to(hidden.dtype), self.bias)


def quantize(module, skip=()):
    for name, child in module.named_children():
        if type(child) is nn.Linear and name not in skip:
            setattr(module, name, Int8Linear(child))
        else:
            quantize(child, skip)
    return module


def adapt(base, name):
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says of tied weights concerns merging
        return get_peft_model(base, copy.deepcopy(ADAPTERS[name]))


def answers(model, **options):
    engine = Engine(model, num_draft_tokens=3, num_blocks=64, block_size=8, **options)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))
    return [completion.token_ids for completion in completions]


def own_answers(base):
    return [reference(base, prompt, NUM_TOKENS) for prompt in PROMPTS]


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", *slow("gpt-neox", "opt-350m", "gemma2", "mixtral")])
@pytest.mark.parametrize("kind", ["block", "lora"])
def test_greedy_over_a_base_with_lora(architecture, kind):
    base = build_base(architecture)
    plain = own_answers(base)
    adapted = adapt(base, "lora everywhere" if kind == "lora" else "lora")
    model = build_heads(adapted, "random", head=kind, committed_context=True, draft_vocab_size=40)
    assert model.base is base
    expected = own_answers(base)
    assert expected != plain
    assert answers(model) == expected


@pytest.mark.parametrize("adapter", ["dora", "ia3"])
def test_greedy_over_other_adapters(adapter):
    base = build_base("llama")
    plain = own_answers(base)
    model = build_heads(adapt(base, adapter), "random", (1, 3), head="mlp")
    assert own_answers(base) != plain
    assert answers(model, pack_weights=True) == own_answers(base)


def test_adapters_of_transformers_itself():
    base = build_base("llama")
    plain = own_answers(base)
    torch.manual_seed(3)
    inject_adapter_in_model(copy.deepcopy(ADAPTERS["lora"]), base, "first")  # as load_adapter and add_adapter do
    assert own_answers(base) != plain
    assert answers(build_heads(base, "random")) == own_answers(base)


def test_switching_merging_and_removing_an_adapter_is_followed():
    base = build_base("llama")
    plain = own_answers(base)
    adapted = adapt(base, "lora")
    torch.manual_seed(4)
    adapted.add_adapter("other", copy.deepcopy(ADAPTERS["lora"]))
    model = build_heads(adapted, "random", head="mlp")
    first = own_answers(base)
    assert answers(model) == first
    adapted.set_adapter("other")
    assert first != own_answers(base) == answers(model)
    adapted.merge_adapter()
    assert answers(model) == own_answers(base)
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        assert answers(model) == own_answers(base) == plain


@pytest.mark.parametrize("architecture", ["llama", *slow("opt-350m", "qwen2", "phi")])
@pytest.mark.parametrize(("kind", "skip"), [("block", ()), ("lora", ("lm_head",))])
def test_greedy_over_a_quantized_base(architecture, kind, skip):
    base = build_base(architecture)
    plain = own_answers(base)
    quantize(base, skip)
    assert own_answers(base) != plain
    model = build_heads(base, "random", head=kind, committed_context=True, draft_vocab_size=40)
    assert answers(model, pack_weights=True) == own_answers(base)


def test_lora_over_a_quantized_base():
    base = quantize(build_base("llama"))
    quantized = own_answers(base)
    adapted = adapt(base, "lora")
    assert own_answers(base) != quantized
    assert answers(build_heads(adapted, "random", head="lora")) == own_answers(base)


def test_exact_mode_refuses_what_it_cannot_put_in_tiles():
    with pytest.raises(ValueError, match="exact mode cannot serve this model: its Linear is no plain linear layer"):
        Engine(build_heads(adapt(build_base("llama"), "lora"), "good"), exact=True)
    with pytest.raises(ValueError, match="its LM head is no plain linear layer"):
        Engine(build_heads(quantize(build_base("llama")), "good"), exact=True)


def test_a_head_starts_as_what_the_stand_in_computes():
    base = build_base("qwen2")
    adapted = adapt(quantize(base), "lora")
    copied = plain_copy(base.model.layers[2].mlp, torch.float32, torch.device("cpu"))
    hidden = torch.randn(1, 5, 32)
    torch.testing.assert_close(copied(hidden), base.model.layers[2].mlp(hidden), rtol=1e-4, atol=1e-4)
    assert {type(module) for module in copied.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    model = EarlyExitModel.from_base(adapted, (2,), head="block")
    assert not any("lora" in name or "scale" in name for name in model.heads.state_dict())
    assert all(parameter.is_floating_point() for parameter in model.heads.parameters())


def test_rows_that_depend_on_each_other_are_told():
    class PerTensor(Int8Linear):
        def forward(self, hidden):
            scale = hidden.abs().max() / 15  # of all rows together
            return super().forward((hidden / scale).round() * scale)

    base = build_base("llama")
    for layer in base.model.layers:
        layer.mlp.up_proj = PerTensor(layer.mlp.up_proj)
    with pytest.warns(UserWarning, match="round a token by all that is read together with it"):
        build_heads(base, "good")


def test_a_module_that_the_walk_would_pass_by_is_noticed():
    base = build_base("llama")
    quantize(base.model.layers[0])
    base.register_forward_pre_hook(lambda module, args, kwargs: (((args[0] + 1) % 64,), kwargs), with_kwargs=True)
    with pytest.raises(ValueError, match="walked layer by layer, does not say what its own forward says"):
        build_heads(base, "good")


def test_adapters_that_are_more_than_modules_are_refused():
    adapted = get_peft_model(build_base("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"'default' on this base \(PREFIX_TUNING\) does more than replace layers"):
        EarlyExitModel.from_base(adapted, (2,))


class TestFingerprint:
    def test_an_adapter_on_the_base_is_told_apart(self, tmp_path):
        base = build_base("llama")
        save_adapter(build_heads(base, "good"), tmp_path / "plain")
        bare = fingerprint(base)
        adapted = adapt(base, "lora")
        found = fingerprint(base)
        assert found["weights"] != bare["weights"]
        with pytest.raises(ValueError, match="it carries an adapter"):
            load_adapter(tmp_path / "plain", adapted)
        save_adapter(build_heads(adapted, "good"), tmp_path / "adapted")
        assert load_adapter(tmp_path / "adapted", adapted).base is base
        with adapted.disable_adapter():
            assert fingerprint(base) == bare
        layer = base.model.layers[3].self_attn.q_proj
        layer.scaling["default"] *= 2
        assert fingerprint(base)["adapters"] != found["adapters"]
        layer.scaling["default"] /= 2
        with torch.no_grad():
            layer.lora_B["default"].weight.mul_(1.02)
        assert fingerprint(base)["adapters"] != found["adapters"]
        with pytest.raises(ValueError, match="or has another one"):
            load_adapter(tmp_path / "adapted", adapted)
        adapted.merge_adapter()
        assert "adapters" not in fingerprint(base)
        assert fingerprint(base)["weights"] != bare["weights"]

    def test_the_name_of_an_adapter_does_not_matter(self):
        bases = [build_base("llama"), build_base("llama")]
        for base, name in zip(bases, ("default", "zebra"), strict=True):
            torch.manual_seed(3)
            get_peft_model(base, copy.deepcopy(ADAPTERS["lora"]), adapter_name=name)
        assert fingerprint(bases[0]) == fingerprint(bases[1])

    def test_a_quantized_base_takes_the_heads_with_a_warning(self, tmp_path):
        save_adapter(build_heads(build_base("llama"), "good"), tmp_path / "heads")
        base = quantize(build_base("llama"), ("lm_head",))
        with pytest.warns(UserWarning, match=r"in another quantisation \(none\): texts are this base's own"):
            assert answers(load_adapter(tmp_path / "heads", base)) == own_answers(base)
        with torch.no_grad():
            base.model.norm.weight.mul_(1.02)
        with pytest.raises(ValueError, match="quantised otherwise, and what quantising keeps is different"):
            load_adapter(tmp_path / "heads", base)
        save_adapter(build_heads(base, "good"), tmp_path / "quantized")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_adapter(tmp_path / "quantized", base)
