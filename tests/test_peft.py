"""Heads as a method of peft: every way in and out, strictly. Fails loudly where peft's internals have changed."""

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hispec import HiSpecConfig, early_exit_model
from hispec.checkpoints import load_adapter, save_adapter
from hispec.heads import DenseAttention, EarlyExitModel
from hispec.infer import Engine, SamplingParams
from hispec.peft_registration import register

from .models import build_base, reference

ROOT = Path(__file__).resolve().parent.parent
IDS = torch.arange(3, 15).unsqueeze(0)
OPTIONS = {"exit_layers": (2, 4), "head": ("block", "lora"), "committed_context": True, "draft_vocab_size": 20}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def base():
    return build_base("llama")


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    build_base("llama").save_pretrained(folder)
    return folder


def train(model: EarlyExitModel) -> EarlyExitModel:
    """Heads moved by chance, with a draft vocabulary that no head has from the start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for head in model.exit_heads:
            head.draft_vocab_ids.copy_(torch.randperm(64)[:20].sort().values)
    model.refresh_draft_vocab()
    return model


def tensors(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def saved(tmp_path):
    """A folder that `save_adapter` wrote, and the heads in it."""
    model = train(EarlyExitModel.from_base(build_base("llama"), **OPTIONS))
    save_adapter(model, tmp_path / "heads")
    return tmp_path / "heads", model


def test_the_method_is_one_of_peft(saved):
    """What we extend in peft by hand: if this fails after an upgrade, see `_register`."""
    assert PeftType("HISPEC") is PeftType.HISPEC
    assert "HISPEC" in list(PeftType)
    config = PeftConfig.from_pretrained(str(saved[0]))
    assert type(config) is HiSpecConfig
    assert config.peft_type is PeftType.HISPEC
    assert [head.kind for head in config.head_configs()] == ["block", "lora"]


def test_the_model_computes_as_ever_to_the_bit(base):
    before, logits, text = tensors(base), base(IDS).logits.clone(), base.generate(IDS, max_new_tokens=8)
    adapted = get_peft_model(base, HiSpecConfig(**OPTIONS))
    train(adapted.early_exit_model())
    assert torch.equal(adapted(IDS).logits, logits)
    assert torch.equal(adapted.generate(input_ids=IDS, max_new_tokens=8), text)
    with adapted.disable_adapter():
        assert torch.equal(adapted(IDS).logits, logits)
    with pytest.raises(ValueError, match="cannot be merged"):
        adapted.merge_and_unload()
    with pytest.raises(ValueError, match="cannot be merged"):
        adapted.merge_adapter()
    assert adapted.unload() is base
    assert equal(tensors(base), before)
    assert not hasattr(base, "peft_config")
    assert torch.equal(base(IDS).logits, logits)


def test_only_the_heads_are_trained(base):
    adapted = get_peft_model(base, HiSpecConfig(**OPTIONS))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    names = [name for name, _ in adapted.early_exit_model().heads.named_parameters()]
    assert trained == {f"base_model.model.exit_heads.hispec_heads.default.{name}" for name in names}


def test_from_save_adapter_to_peft(saved, base):
    folder, model = saved
    adapted = PeftModel.from_pretrained(base, folder)
    loaded = adapted.early_exit_model()
    assert equal(tensors(loaded.heads), tensors(model.heads))
    assert not any(parameter.requires_grad for parameter in adapted.parameters())
    engine = Engine(loaded, num_blocks=32)
    completion = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=10, ignore_eos=True))[0]
    assert completion.token_ids == reference(base, [5, 6, 7], 10)
    # The rows of the LM head are those of the file's draft vocabulary.
    torch.testing.assert_close(loaded.exit_logits(0, torch.ones(1, 32)), model.exit_logits(0, torch.ones(1, 32)))


def test_from_peft_to_load_adapter(tmp_path, base):
    adapted = get_peft_model(base, HiSpecConfig(**OPTIONS))
    heads = tensors(train(adapted.early_exit_model()).heads)
    adapted.save_pretrained(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    assert sum(tensor.numel() for tensor in stored.values()) == sum(tensor.numel() for tensor in heads.values())
    assert equal(tensors(load_adapter(tmp_path, build_base("llama")).heads), heads)
    assert equal(tensors(PeftModel.from_pretrained(build_base("llama"), tmp_path).early_exit_model().heads), heads)


def test_heads_and_base_by_one_name(tmp_path, base_folder):
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    adapted = get_peft_model(base, HiSpecConfig(**OPTIONS))
    heads = tensors(train(adapted.early_exit_model()).heads)
    adapted.save_pretrained(tmp_path)
    found = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert equal(tensors(found.early_exit_model().heads), heads)
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert equal(tensors(early_exit_model(by_transformers).heads), heads)


def test_load_adapter_of_transformers(saved, base):
    folder, model = saved
    base.load_adapter(str(folder))
    loaded = early_exit_model(base)
    assert equal(tensors(loaded.heads), tensors(model.heads))
    engine = Engine(loaded, num_blocks=32, pack_weights=True)
    completion = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=10, ignore_eos=True))[0]
    assert completion.token_ids == reference(base, [5, 6, 7], 10)
    # Loading puts other tensors in the places of those that the heads began with.
    state = torch.ones(1, 3, 32)
    arguments = (state, state, torch.arange(3), DenseAttention([3]))
    for head, expected in zip(loaded.heads, model.heads, strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(head(*arguments), expected(*arguments))


def test_two_adapters_on_one_base(tmp_path, saved, base):
    folder, model = saved
    adapted = PeftModel.from_pretrained(base, folder, is_trainable=True)
    adapted.add_adapter("small", HiSpecConfig(exit_layers=(1,), head="norm"))
    assert all(parameter.requires_grad for parameter in adapted.early_exit_model().heads.parameters())
    assert adapted.early_exit_model("small").exit_layers == (1,)
    adapted.set_adapter("small")
    assert adapted.early_exit_model().exit_layers == (1,)
    adapted.save_pretrained(tmp_path / "both")
    assert equal(tensors(load_adapter(tmp_path / "both", build_base("llama")).heads), tensors(model.heads))
    assert load_adapter(tmp_path / "both" / "small", build_base("llama")).exit_layers == (1,)
    adapted.delete_adapter("small")
    assert adapted.early_exit_model().exit_layers == (2, 4)
    adapted.load_adapter(folder, "again")
    assert equal(tensors(adapted.early_exit_model("again").heads), tensors(model.heads))
    with pytest.raises(ValueError, match="no adapter 'none' with exit heads; there are default, again"):
        adapted.early_exit_model("none")


def test_heads_over_a_base_with_lora(tmp_path, base):
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    lora = get_peft_model(base, copy.deepcopy(config))
    expected = reference(base, [5, 6, 7], 8)
    adapted = get_peft_model(lora, HiSpecConfig(**OPTIONS))
    heads = tensors(train(adapted.early_exit_model()).heads)
    assert torch.equal(adapted(IDS).logits, lora(IDS).logits)
    engine = Engine(adapted.early_exit_model(), num_blocks=32)
    completion = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True))[0]
    assert completion.token_ids == expected
    adapted.save_pretrained(tmp_path)
    assert adapted.unload() is base
    assert type(base.peft_config["default"]) is LoraConfig
    assert reference(base, [5, 6, 7], 8) == expected
    assert equal(tensors(load_adapter(tmp_path, lora).heads), heads)
    with pytest.raises(ValueError, match="without the adapter"):
        load_adapter(tmp_path, build_base("llama"))


class TestStrictness:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda good, name: good.pop(name), "lacks the tensor '0.norm.weight'"),
            (lambda good, name: good.update(extra=good[name].clone()), "a tensor 'extra' that no head takes"),
            (lambda good, name: good.update({name: good[name][:-1].clone()}), r"'0.norm.weight' has shape \[31\]"),
        ],
    )
    def test_a_wrong_tensor_is_an_error_and_leaves_the_base_as_it_was(self, saved, base, change, words):
        folder, _ = saved
        before = tensors(base)
        good = load_file(folder / WEIGHTS)
        change(good, next(name for name in good if name.endswith("0.norm.weight")))
        save_file(good, folder / WEIGHTS)
        with pytest.raises(ValueError, match=words):
            PeftModel.from_pretrained(base, folder)
        assert equal(tensors(base), before)

    def test_a_tensor_that_transformers_did_not_find_is_an_error(self, saved, base):
        folder, _ = saved
        good = load_file(folder / WEIGHTS)
        save_file({name: tensor for name, tensor in good.items() if "1.deltas.mlp/up" not in name}, folder / WEIGHTS)
        base.load_adapter(str(folder))
        with pytest.raises(ValueError, match=r"'1\.deltas\.mlp/up_proj\.down' of the adapter 'default' was not loaded"):
            early_exit_model(base)

    def test_another_base_is_an_error(self, saved):
        other = build_base("llama")
        torch.nn.init.ones_(other.model.norm.weight)
        with pytest.raises(ValueError, match="not for this base: the architecture is the same, but the weights"):
            PeftModel.from_pretrained(other, saved[0])

    def test_what_no_head_can_be(self, base):
        for options, words in [
            ({"exit_layers": (0,)}, "exit layer 0 needs"),
            ({"exit_layers": (2,), "head": "magic"}, "'magic' is unknown"),
            ({"exit_layers": (2,), "heads": []}, "both heads and exit_layers"),
            ({"format_version": 9}, "format version 9"),
        ]:
            with pytest.raises(ValueError, match=words):
                HiSpecConfig(**options)
        with pytest.raises(ValueError, match="exit layer 6 is out of range"):
            get_peft_model(base, HiSpecConfig(exit_layers=(6,)))
        with pytest.raises(ValueError, match="has no exit heads"):
            early_exit_model(base)

    def test_other_adapters_are_no_heads(self, tmp_path, base):
        get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
        with pytest.raises(ValueError, match=r"an adapter of another kind \('LORA'\); load it with peft"):
            load_adapter(tmp_path, build_base("llama"))


def run(code):
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.split(), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports", ["import hispec, peft", "import peft, hispec", "import hispec.checkpoints.peft_method, peft"]
)
def test_importing_hispec_registers_in_any_order(imports):
    assert run(f"{imports}; print(peft.PeftType('HISPEC').value)")[0] == ["HISPEC"]


def test_what_keeps_peft_from_taking_heads_is_a_warning(monkeypatch):
    def fail(name):
        raise AttributeError("no such\nplace")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.warns(UserWarning, match=r"peft [\d.]+ does not take exit heads \(AttributeError: no such place\): .*"):
        register()


@pytest.mark.slow
def test_a_peft_that_cannot_be_extended_is_told_in_one_warning():
    spoil = "import peft.utils as u; del u.register_peft_method"
    code = f"import sys, peft; {spoil}; import hispec; print(hispec.load_adapter.__name__)"
    out, err = run(code)
    assert out == ["load_adapter"]
    assert err.count("does not take exit heads (ImportError: cannot import name 'register_peft_method'") == 1
