"""Adapters to a hub and back: the real client against a hub on loopback."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hispec import Engine, load_adapter, push_adapter, save_adapter
from hispec.checkpoints import check_push, load_verifier, save_verifier
from hispec.checkpoints.adapter import VERIFIER_FILES
from hispec.checkpoints.push_command import main
from hispec.heads import DraftVerifier
from hispec.infer.command import main as infer
from hispec.train.command import main as train

from .fake_hub import READER, STRANGER, WRITER, FakeHub, point_client_at, run_hub
from .test_adapter import assert_same_heads, build_model
from .train_support import build_tokenizer, write_prompts

# The client's own way to send a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

CONFIG, WEIGHTS, RUN, CARD = "adapter_config.json", "adapter_model.safetensors", "run.json", "README.md"
RECORD = {
    "command": ["hispec-train", "--model", "lab/base"],
    "recipe": {"data": {"prompts": "prompts.jsonl", "greedy": True, "num_sampled": 1, "temperature": 0.8}},
    "acceptance": {
        "num_tokens": 321,
        "hops": {
            "2->4": {"agreement": 0.51, "acceptance": 0.525},
            "2->target": {"agreement": 0.25, "acceptance": 0.125},
        },
        "by_kind": {"odd|one": {"2->4": {"agreement": 0.75, "acceptance": 0.625}, "2->target": {}}},
    },
    "num_training_tokens": 9876,
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with run_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An empty hub that the client of this process speaks with, by a token that may write."""
    # Nobody waits between two tries.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server.reset()
    point_client_at(server, tmp_path / "cache", WRITER, monkeypatch)
    return server


@pytest.fixture(scope="module")
def named_base(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A base that says it came from the hub."""
    base: PreTrainedModel = request.getfixturevalue("make_base")("llama")
    base.config._name_or_path = base.name_or_path = "lab/base"
    return base


@pytest.fixture
def adapter(tmp_path: Path, named_base: PreTrainedModel) -> Path:
    """The folder of an adapter with its record."""
    save_adapter(build_model(named_base), tmp_path / "heads", RECORD)
    return tmp_path / "heads"


def local(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def pushed(hub: FakeHub, repo: str = "me/heads", revision: str = "main") -> dict[str, bytes]:
    """What a repository holds of an adapter."""
    return {
        name: content for name, content in hub.repositories[repo].files(revision).items() if name != ".gitattributes"
    }


class TestPush:
    def test_every_byte_arrives_and_only_an_adapters_files(
        self, hub: FakeHub, adapter: Path, named_base: PreTrainedModel
    ) -> None:
        (adapter / "figures").mkdir()
        for name in ("report.md", "report.html", "figures/curve.svg", "figures/curve.png"):
            (adapter / name).write_bytes(os.urandom(700))
        expected = local(adapter, CONFIG, WEIGHTS, RUN, "report.md", "report.html", "figures/curve.svg")
        expected |= local(adapter, "figures/curve.png")
        for name in ("notes.txt", "adapter_model.bin", ".env", "figures/curve.pkl", "training.pt"):
            (adapter / name).write_text("not for others")
        assert push_adapter(adapter, "me/heads") == f"{hub.endpoint}/me/heads"
        found = pushed(hub)
        card = found.pop(CARD).decode()
        assert found == expected
        assert "[report.md](report.md)" in card
        assert len(hub.repositories["me/heads"].messages) == 2
        assert_same_heads(load_adapter("me/heads", named_base), load_adapter(adapter, named_base))
        assert {token for _, path, token in hub.requests if path.startswith("/storage")} == {None}

    def test_a_verifier_goes_along_and_one_of_other_heads_does_not(
        self, hub: FakeHub, adapter: Path, named_base: PreTrainedModel
    ) -> None:
        verifier = DraftVerifier(exit_layer=2, weight=torch.ones(35), bias=torch.tensor(1.0))
        save_verifier(verifier, adapter, measured={}, run={})
        push_adapter(adapter, "me/heads")
        expected = local(adapter, *VERIFIER_FILES)
        assert expected.items() <= pushed(hub).items()
        folder = load_adapter("me/heads", named_base).adapter_folder
        assert folder is not None
        assert load_verifier(folder).weight.equal(verifier.weight)
        save_file({name: tensor + 1 for name, tensor in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
        with pytest.raises(ValueError, match="was fitted to other heads than lie there now"):
            push_adapter(adapter, "me/heads")
        for name in VERIFIER_FILES:
            (adapter / name).unlink()
        push_adapter(adapter, "me/heads")
        assert pushed(hub).keys().isdisjoint(VERIFIER_FILES)

    def test_in_parts(self, hub: FakeHub, adapter: Path) -> None:
        hub.chunk_size = 10_000
        push_adapter(adapter, "me/heads")
        assert hub.asked("PUT", "/storage/.*/2$") == 1
        assert pushed(hub)[WEIGHTS] == (adapter / WEIGHTS).read_bytes()

    def test_private_branch_and_message(self, hub: FakeHub, adapter: Path, named_base: PreTrainedModel) -> None:
        address = push_adapter(adapter, "lab/heads", private=True, revision="v2", message="better heads")
        assert address == f"{hub.endpoint}/lab/heads/tree/v2"
        repository = hub.repositories["lab/heads"]
        assert repository.private
        assert repository.messages[-1] == "better heads"
        assert pushed(hub, "lab/heads") == {}
        assert local(adapter, CONFIG, WEIGHTS, RUN).items() <= pushed(hub, "lab/heads", "v2").items()
        push_adapter(adapter, "lab/heads", private=True, revision="v2")  # the branch is there now
        assert load_adapter("lab/heads", named_base, revision="v2").exit_layers == (2, 4)
        with pytest.raises(ValueError, match=r"'lab/heads' holds no adapter_config.json, so it is no adapter"):
            load_adapter("lab/heads", named_base)

    def test_the_old_adapter_is_replaced_whole_and_other_files_stay(self, hub: FakeHub, adapter: Path) -> None:
        old = {RUN: b"{}", "report.md": b"old", "figures/old.png": b"old", "LICENSE": b"kept", "figures/x.pdf": b"kept"}
        hub.add("me/heads", old)
        (adapter / RUN).unlink()
        push_adapter(adapter, "me/heads")
        assert pushed(hub).keys() == {CONFIG, WEIGHTS, CARD, "LICENSE", "figures/x.pdf"}

    def test_pushed_again_unchanged(self, hub: FakeHub, adapter: Path) -> None:
        push_adapter(adapter, "me/heads")
        commits, sent = len(hub.repositories["me/heads"].commits), hub.asked("PUT", "/storage")
        push_adapter(adapter, "me/heads")
        assert len(hub.repositories["me/heads"].commits) == commits
        assert hub.asked("PUT", "/storage") == sent == 1

    def test_a_link_to_the_folder(self, hub: FakeHub, adapter: Path) -> None:
        (adapter.parent / "latest").symlink_to(adapter)
        push_adapter(adapter.parent / "latest", "me/heads")
        assert pushed(hub)[WEIGHTS] == (adapter / WEIGHTS).read_bytes()

    def test_a_gitignore_on_the_hub(self, hub: FakeHub, adapter: Path) -> None:
        hub.ignored = {WEIGHTS}
        with pytest.raises(
            ValueError, match=r"adapter_model.safetensors is not there.*take its name out of .gitignore"
        ):
            push_adapter(adapter, "me/heads")


class TestInterrupted:
    @pytest.mark.parametrize("what", ["drop", "drop body", "drop answer", 500])
    @pytest.mark.parametrize(("method", "path"), [("PUT", "/storage"), ("POST", "/commit/")])
    def test_once(self, hub: FakeHub, adapter: Path, method: str, path: str, what: int | str) -> None:
        hub.fail(method, path, what)
        push_adapter(adapter, "me/heads")
        assert local(adapter, CONFIG, WEIGHTS, RUN).items() <= pushed(hub).items()
        # One by the creation, one by the push: a commit whose answer was lost is not made twice.
        assert len(hub.repositories["me/heads"].commits) == 2

    @pytest.mark.parametrize("what", ["drop body", 503])
    def test_for_good(self, hub: FakeHub, adapter: Path, what: int | str) -> None:
        before = hub.add("me/heads", {CONFIG: b"old", WEIGHTS: b"old"}).files()
        hub.fail("PUT", "/storage", what, times=100)
        words = "goes on where it was" if what == "drop body" else "503.*try again later"
        with pytest.raises(ValueError, match=words):
            push_adapter(adapter, "me/heads")
        assert hub.repositories["me/heads"].files() == before
        hub.faults.clear()
        push_adapter(adapter, "me/heads")
        assert local(adapter, CONFIG, WEIGHTS, RUN).items() <= pushed(hub).items()

    def test_what_has_arrived_is_not_sent_again(self, hub: FakeHub, adapter: Path) -> None:
        hub.fail("POST", "/commit/", "drop", times=100)
        with pytest.raises(ValueError, match="goes on where it was"):
            push_adapter(adapter, "me/heads")
        hub.faults.clear()
        push_adapter(adapter, "me/heads")
        assert hub.asked("PUT", "/storage") == 1

    def test_ctrl_c(
        self, hub: FakeHub, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupted)
        assert main([str(adapter), "me/heads"]) == 130
        assert "interrupted; me/heads holds what it held before" in capsys.readouterr().err
        assert pushed(hub) == {}


class TestPermission:
    @pytest.mark.parametrize(
        ("token", "repo", "words"),
        [
            (None, "me/heads", r"no token to push to me/heads with; run `hf auth login`, or set HF_TOKEN"),
            ("hf_unknown", "me/heads", "the token is unknown or has expired; run `hf auth login`"),
            (READER, "me/heads", "the token may only read"),
            (STRANGER, "me/heads", "belongs to other, who is not in me; push to other/heads"),
            (WRITER, "club/heads", "me may only read in the organization club"),
        ],
    )
    def test_is_asked_before_anything_is_sent(
        self, hub: FakeHub, adapter: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, repo: str, words: str
    ) -> None:
        monkeypatch.delenv("HF_TOKEN")
        for call in (lambda: push_adapter(adapter, repo, token=token), lambda: check_push(repo, token=token)):
            with pytest.raises(ValueError, match=words) as caught:
                call()
            assert str(token) not in str(caught.value)
        assert hub.repositories == {}
        assert {method for method, _, _ in hub.requests} <= {"GET"}

    @pytest.mark.parametrize("token", ["", "hf_writer\n", "hf writer", "hf_ü"])
    def test_a_token_that_cannot_be_sent(self, hub: FakeHub, adapter: Path, token: str) -> None:
        with pytest.raises(ValueError, match="the token is empty, or holds spaces or line breaks; copy it again"):
            push_adapter(adapter, "me/heads", token=token)

    def test_a_given_token_goes_before_that_of_the_environment(
        self, hub: FakeHub, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", STRANGER)
        push_adapter(adapter, "me/heads", token=WRITER)
        assert {token for _, path, token in hub.requests if path.startswith("/api/models/me")} == {WRITER}

    def test_a_public_repository_does_not_take_what_shall_be_private(
        self, hub: FakeHub, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = hub.add("me/heads").files()
        for call in (
            lambda: push_adapter(adapter, "me/heads", private=True),
            lambda: check_push("me/heads", private=True),
        ):
            with pytest.raises(ValueError, match="me/heads is there already and public"):
                call()
        assert hub.asked("POST", "") == 0
        # Nor where it was made a moment after the check.
        monkeypatch.setattr("hispec.checkpoints.push.check_push", lambda *arguments, **options: None)
        with pytest.raises(ValueError, match="me/heads is there already and public"):
            push_adapter(adapter, "me/heads", private=True)
        assert hub.repositories["me/heads"].files() == before
        assert hub.asked("PUT", "/storage") == 0

    @pytest.mark.parametrize(
        ("method", "path", "status", "words"),
        [
            ("GET", "/whoami", 429, "too many requests; wait a few minutes"),
            ("POST", "/repos/create", 402, "plan or quota"),
            ("POST", "/commit/", 403, "the token lacks the permission"),
            ("POST", "/commit/", 413, "too large"),
            ("POST", "/commit/", 409, "something else is being written"),
            ("POST", "/batch", 507, "no storage left"),
            ("POST", "/preupload/", 401, "unknown or has expired"),
        ],
    )
    def test_what_the_hub_refuses(
        self, hub: FakeHub, adapter: Path, method: str, path: str, status: int, words: str
    ) -> None:
        hub.fail(method, path, status, times=100)
        with pytest.raises(ValueError, match=f"the hub refused to take me/heads .*{words}"):
            push_adapter(adapter, "me/heads")

    def test_no_hub_and_offline_mode(self, hub: FakeHub, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
            with pytest.raises(ValueError, match="the connection to the hub failed while me/heads was pushed"):
                push_adapter(adapter, "me/heads")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match="offline mode; unset HF_HUB_OFFLINE"):
            push_adapter(adapter, "me/heads")


class TestFolder:
    def test_no_adapter(self, hub: FakeHub, adapter: Path) -> None:
        adapter.rename(adapter.parent / "adapter")
        with pytest.raises(ValueError, match=r"holds no adapter_config.json; did you mean .*/adapter\?"):
            push_adapter(adapter.parent, "me/heads")
        with pytest.raises(ValueError, match=r"holds no adapter_config.json; give one that save_adapter wrote"):
            push_adapter(adapter.parent / "nothing", "me/heads")

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            (CONFIG, "{", "not readable JSON"),
            (CONFIG, "{}", "no format_version"),
            (WEIGHTS, "", "broken or cut short"),
            (WEIGHTS, None, "holds no adapter_model.safetensors"),
            (RUN, "{", "run.json is no JSON"),
            (RUN, "[]", "holds no record of a run"),
            (CARD, "---\na: [\n---\n", "README.md has metadata that cannot be read"),
            (CARD, "---\nbase_model: /models/llama\n---\n", "names the base model '/models/llama', which is no hub id"),
            (CARD, "---\nbase_model: [lab/base, ./llama]\n---\n", "names the base model './llama'"),
            (CARD, "Trained on `/home/ann/secret.jsonl`.", "names /home/ann/secret.jsonl, a path of one machine"),
        ],
    )
    def test_is_checked_before_the_hub_is_asked(
        self, hub: FakeHub, adapter: Path, name: str, content: str | None, words: str
    ) -> None:
        (adapter / name).unlink() if content is None else (adapter / name).write_text(content)
        with pytest.raises(ValueError, match=words):
            push_adapter(adapter, "me/heads")
        assert hub.repositories == {}

    def test_a_base_of_this_machine(self, hub: FakeHub, adapter: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text()) | {"base_model_name_or_path": "../models/llama"}
        (adapter / CONFIG).write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"names the base '../models/llama', which is no hub id"):
            push_adapter(adapter, "me/heads")

    @pytest.mark.parametrize("name", [RUN, CARD, "report.md", "figures"])
    def test_links_could_send_any_file(self, hub: FakeHub, adapter: Path, tmp_path: Path, name: str) -> None:
        secret = tmp_path / "secret"
        secret.mkdir() if name == "figures" else secret.write_text("{}")
        (adapter / name).unlink(missing_ok=True)
        (adapter / name).symlink_to(secret)
        with pytest.raises(ValueError, match=f"{name} is a link"):
            push_adapter(adapter, "me/heads")
        assert hub.requests == []

    @pytest.mark.parametrize("repo", ["", "heads", "me/", "a/b/c", "../heads", "me/..", "/heads", "me/he ads"])
    def test_names(self, hub: FakeHub, adapter: Path, repo: str) -> None:
        with pytest.raises(ValueError, match="is no name for a repository; write user/name"):
            push_adapter(adapter, repo)
        assert hub.requests == []

    def test_names_that_only_the_hub_refuses(self, hub: FakeHub, adapter: Path) -> None:
        with pytest.raises(ValueError, match=r"'me/a--b' is no name for a repository .*write user/name"):
            push_adapter(adapter, "me/a--b")


class TestCard:
    def read(self, hub: FakeHub) -> ModelCard:
        return ModelCard(pushed(hub)[CARD].decode())

    def test_says_what_the_adapter_is(self, hub: FakeHub, adapter: Path) -> None:
        hub.add("lab/base", {CARD: b"---\nlicense: apache-2.0\n---\n"})
        push_adapter(adapter, "me/heads")
        card = self.read(hub)
        data = card.data.to_dict()
        assert data["base_model"] == "lab/base"
        assert data["base_model_relation"] == "adapter"
        assert data["license"] == "apache-2.0"
        assert data["library_name"] == "hispec"
        results = {result.metric_name: result.metric_value for result in card.data.eval_results}
        assert results["exit 2 to target, top-1 agreement"] == 0.25
        for line in (
            'engine = Engine.from_pretrained("lab/base", adapter="me/heads")',
            "| 2 of 6 | `block` | yes | 20 of 64 tokens |",
            "to the prompts of `prompts.jsonl`, 9876 tokens.",
            "On 321 tokens of held-out responses",
            "|  | exit 2 to exit 4 | exit 2 to target |",
            "| all | 0.510 / 0.525 | 0.250 / 0.125 |",
            r"| odd\|one | 0.750 / 0.625 | ? / ? |",
            "That of the base, `apache-2.0`",
        ):
            assert line in card.text

    def test_a_licence_with_a_name(self, hub: FakeHub, adapter: Path) -> None:
        hub.add("lab/base", {CARD: b"---\nlicense: other\nlicense_name: lab-1\nlicense_link: LICENSE\n---\n"})
        push_adapter(adapter, "me/heads")
        data = self.read(hub).data.to_dict()
        assert (data["license"], data["license_name"]) == ("other", "lab-1")
        assert data["license_link"] == "https://huggingface.co/lab/base/blob/main/LICENSE"

    @pytest.mark.parametrize("card", [None, b"", b"---\nlicense: [mit, apache-2.0]\n---\n", "unreachable"])
    def test_a_licence_that_is_not_known(self, hub: FakeHub, adapter: Path, card: Any) -> None:
        if card == "unreachable":
            hub.fail("GET", "/api/models/lab/base", "drop", times=100)
        elif card is not None:
            hub.add("lab/base", {CARD: card})
        push_adapter(adapter, "me/heads")
        assert "license" not in self.read(hub).data.to_dict()
        assert "could not be looked up" in self.read(hub).text

    def test_a_base_that_is_no_repository(self, hub: FakeHub, adapter: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text())
        for base, words in [
            (None, '"FOLDER_OF_THE_BASE"'),
            ("package:no-such-package", "inside the Python package `no-such-package`"),
        ]:
            (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": base}))
            push_adapter(adapter, "me/heads")
            assert "base_model" not in self.read(hub).data.to_dict()
            assert words in self.read(hub).text

    def test_names_no_path(self, hub: FakeHub, adapter: Path, tmp_path: Path) -> None:
        record = json.loads(json.dumps(RECORD))
        record["recipe"]["data"]["prompts"] = str(tmp_path / "prompts.jsonl")
        record["recipe"]["model"] = {"source": str(tmp_path)}
        record["recipe"]["output"] = record["command"][1] = str(tmp_path)
        (adapter / RUN).write_text(json.dumps(record))
        push_adapter(adapter, "me/heads")
        card = pushed(hub)[CARD].decode()
        assert "`prompts.jsonl`" in card
        assert str(tmp_path) not in card

    @pytest.mark.parametrize("record", [{}, {"acceptance": None, "recipe": []}, {"acceptance": {"hops": {"2->4": 3}}}])
    def test_records_of_another_hand(self, hub: FakeHub, adapter: Path, record: dict[str, Any]) -> None:
        (adapter / RUN).write_text(json.dumps(record))
        push_adapter(adapter, "me/heads")
        assert "was not recorded" in self.read(hub).text

    def test_ones_own_goes_up_as_it_is(self, hub: FakeHub, adapter: Path) -> None:
        (adapter / CARD).write_text("---\nbase_model: lab/base\n---\n\nBy hand; see https://x.org/home/ann.\r\n")
        push_adapter(adapter, "me/heads")
        assert pushed(hub)[CARD] == (adapter / CARD).read_bytes()


class TestPull:
    @pytest.fixture
    def repository(self, hub: FakeHub, adapter: Path) -> Any:
        """An adapter that somebody else has put there."""
        return hub.add("other/heads", local(adapter, CONFIG, WEIGHTS, RUN))

    def test_is_cached_and_found_offline(
        self, hub: FakeHub, adapter: Path, repository: Any, named_base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load_adapter("other/heads", named_base)
        assert_same_heads(model, load_adapter(adapter, named_base))
        sent = hub.asked("GET", "/storage")
        load_adapter("other/heads", named_base)
        assert hub.asked("GET", "/storage") == sent == 1
        num_requests = len(hub.requests)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        for revision in (None, "main", repository.branches["main"]):
            assert_same_heads(load_adapter("other/heads", named_base, revision=revision), model)
        for repo, revision in (("other/heads", "v2"), ("other/more", None)):
            with pytest.raises(ValueError, match="not in the local cache"):
                load_adapter(repo, named_base, revision=revision)
        assert len(hub.requests) == num_requests

    def test_a_revision_is_that_revision(
        self, hub: FakeHub, adapter: Path, repository: Any, named_base: PreTrainedModel
    ) -> None:
        first = repository.branches["main"]
        newer = build_model(named_base, seed=2)
        save_adapter(newer, adapter)
        repository.commit("main", local(adapter, CONFIG, WEIGHTS), "newer")
        assert_same_heads(load_adapter("other/heads", named_base), newer)
        old, new = (load_adapter("other/heads", named_base, revision=revision) for revision in (first, "main"))
        assert_same_heads(new, newer)
        name, tensor = next((n, t) for n, t in newer.heads.state_dict().items() if t.is_floating_point())
        assert not torch.equal(old.heads.state_dict()[name], tensor)
        with pytest.raises(ValueError, match="at revision 'v9' does not exist on the hub; check the revision"):
            load_adapter("other/heads", named_base, revision="v9")

    def test_the_base_comes_from_the_hub_too(
        self, hub: FakeHub, repository: Any, named_base: PreTrainedModel, tmp_path: Path
    ) -> None:
        named_base.save_pretrained(tmp_path / "base")
        build_tokenizer().save_pretrained(tmp_path / "base")
        hub.add("lab/base", {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}, private=True)
        assert load_adapter("other/heads").base.config._name_or_path == "lab/base"
        engine = Engine.from_pretrained("lab/base", adapter="other/heads")
        assert engine.model.exit_layers == (2, 4)

    def test_hostile_names_and_pickles_are_never_asked_for(
        self, hub: FakeHub, repository: Any, named_base: PreTrainedModel, tmp_path: Path
    ) -> None:
        names = [
            "../adapter_config.json",
            "/etc/run.json",
            "x/../../run.json",
            "..",
            "adapter_model.bin",
            "x.pkl",
            "a.py",
        ]
        names += ["sub/adapter_config.json", "README.md", "..\\run.json", "C:\\run.json", "con\x00.json", "~/.bashrc"]
        repository.listed_too = [{"type": "file", "path": name, "size": 4, "oid": "0" * 40} for name in names]
        repository.listed_too.append({"type": "symlink", "path": "link", "oid": "0" * 40})
        before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
        load_adapter("other/heads", named_base)
        asked = {
            path.rpartition("/resolve/")[2].partition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path
        }
        assert asked == {CONFIG, WEIGHTS, RUN}
        assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
        (snapshot,) = (tmp_path / "cache" / "models--other--heads" / "snapshots").iterdir()
        assert sorted(path.name for path in snapshot.iterdir()) == [CONFIG, WEIGHTS, RUN]

    def test_pickles_alone_are_no_adapter(
        self, hub: FakeHub, adapter: Path, repository: Any, named_base: PreTrainedModel
    ) -> None:
        repository.commit("main", {**local(adapter, CONFIG), "adapter_model.bin": b"\x80\x04."}, "pickle")
        with pytest.raises(ValueError, match=r"holds no adapter_model.safetensors, so it is no adapter"):
            load_adapter("other/heads", named_base)
        assert not hub.asked("GET", r"\.bin") + hub.asked("HEAD", r"\.bin")

    @pytest.mark.parametrize(
        "content", [b"../../../secret", b"\x80\x04\x95.", b"version https://git-lfs.github.com/spec/v1"]
    )
    def test_weights_that_are_something_else(
        self, hub: FakeHub, adapter: Path, repository: Any, named_base: PreTrainedModel, content: bytes
    ) -> None:
        repository.commit("main", {**local(adapter, CONFIG), WEIGHTS: content}, "hostile")
        with pytest.raises(ValueError, match="broken or cut short"):
            load_adapter("other/heads", named_base)

    @pytest.mark.parametrize("error", [-1, 1])
    def test_a_size_that_does_not_match(
        self, hub: FakeHub, repository: Any, named_base: PreTrainedModel, error: int
    ) -> None:
        hub.size_error = error
        with pytest.raises(ValueError, match=r"'other/heads' cannot be loaded \(Consistency check failed"):
            load_adapter("other/heads", named_base)
        hub.size_error = 0
        load_adapter("other/heads", named_base)

    def test_a_download_that_breaks_off_goes_on(
        self, hub: FakeHub, adapter: Path, repository: Any, named_base: PreTrainedModel
    ) -> None:
        hub.fail("GET", "/storage", "cut answer")
        assert_same_heads(load_adapter("other/heads", named_base), load_adapter(adapter, named_base))
        assert hub.asked("GET", "/storage") == 2

    @pytest.mark.parametrize(
        ("method", "path", "what", "words"),
        [
            ("GET", "/api/models", "drop", "hub cannot be reached"),
            ("GET", "/storage", "drop", "hub cannot be reached"),
            ("GET", "/api/models", 429, "hub refused.*429.*wait a few minutes"),
            ("HEAD", "/resolve", 403, "hub refused.*403.*lacks the permission"),
            ("GET", "/api/models", 401, "hub refused.*401.*token is unknown"),
        ],
    )
    def test_a_hub_that_refuses(
        self, hub: FakeHub, repository: Any, named_base: PreTrainedModel, method: str, path: str, what: Any, words: str
    ) -> None:
        hub.fail(method, path, what, times=100)
        with pytest.raises(ValueError, match=f"'other/heads'.*{words}|{words}"):
            load_adapter("other/heads", named_base)

    def test_a_private_repository_of_others(
        self, hub: FakeHub, repository: Any, named_base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository.private = True
        with pytest.raises(ValueError, match=r"not on the hub, or it is private; .*hf auth login"):
            load_adapter("other/heads", named_base)
        monkeypatch.setenv("HF_TOKEN", STRANGER)
        load_adapter("other/heads", named_base)


class TestCommand:
    def test_push(self, hub: FakeHub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--private", "--revision", "v1", "--message", "first", "--token", WRITER]
        assert main([str(adapter), "me/heads", *flags]) == 0
        assert capsys.readouterr().out == f"{hub.endpoint}/me/heads/tree/v1\n"
        assert hub.repositories["me/heads"].private
        assert hub.repositories["me/heads"].messages[-1] == "first"

    def test_dry_run(self, hub: FakeHub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
        hub.add("lab/base", {CARD: b"---\nlicense: mit\n---\n"})
        assert main([str(adapter), "me/heads", "--dry-run"]) == 0
        output = capsys.readouterr()
        assert ModelCard(output.out).data.license == "mit"
        listed = dict(reversed(line.split()) for line in output.err.splitlines())
        expected = {name: str(len(content)) for name, content in local(adapter, CONFIG, WEIGHTS, RUN).items()}
        assert listed == expected | {CARD: str(len(output.out.encode()))}
        assert [path for _, path, _ in hub.requests if "agent" not in path] == ["/api/models/lab/base"]
        assert main([str(adapter), "me/heads"]) == 0
        assert pushed(hub)[CARD].decode() == output.out

    def test_errors(self, hub: FakeHub, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in (["nowhere", "me/heads"], [str(adapter), "heads"], [str(adapter), "you/heads"]):
            assert main(arguments) == 2
            output = capsys.readouterr()
            assert output.out == ""
            assert output.err.startswith("hispec-push: error: ")
            assert output.err.count("\n") == 1


@pytest.fixture(scope="module")
def base_files(named_base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The repository of a tiny base with its tokenizer."""
    return files_of(named_base, tmp_path_factory.mktemp("base"))


def files_of(base: PreTrainedModel, folder: Path) -> dict[str, bytes]:
    base.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {CARD: b"---\nlicense: mit\n---\n"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Minutes of training in a second."""
    write_prompts(tmp_path / "prompts.jsonl")
    path = tmp_path / "tiny.yaml"
    path.write_text(f"""
        model:
          source: lab/base
        heads:
          exit_layers: [0, 2]
          draft_vocab_size: 48
        data:
          prompts: {tmp_path / "prompts.jsonl"}
          max_new_tokens: 16
          num_tokens: 150
          batch_size: 4
          held_out_fraction: 0.2
        training:
          batch_tokens: 64
          warmup_steps: 1
          max_steps: 3
    """)
    return path


class TestTrain:
    @pytest.mark.parametrize(
        ("architecture", "kinds"), [("llama", "block,block"), ("qwen3", "lora,norm"), ("opt", "block,mlp")]
    )
    def test_train_push_pull_infer(
        self,
        hub: FakeHub,
        make_base: Any,
        recipe: Path,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        architecture: str,
        kinds: str,
    ) -> None:
        """The whole way, on the architecture of every recipe."""
        hub.add("lab/base", files_of(make_base(architecture), tmp_path / "base"))
        run = tmp_path / "run"
        flags = [
            "--recipe",
            str(recipe),
            "--head",
            kinds,
            "--output",
            str(run),
            "--push-to-hub",
            "me/heads",
            "--private",
        ]
        assert train(flags) == 0
        assert f"pushed: {hub.endpoint}/me/heads" in capfd.readouterr().out
        assert hub.repositories["me/heads"].private
        assert local(run / "adapter", CONFIG, WEIGHTS, RUN).items() <= pushed(hub).items()
        card = ModelCard(pushed(hub)[CARD].decode())
        assert (card.data.base_model, card.data.license) == ("lab/base", "mit")
        assert "exit 0 to target" in card.text
        assert str(tmp_path) not in str(card)

        assert load_adapter("me/heads").exit_layers == (0, 2)
        arguments = ["--model", "lab/base", "--raw", "--prompt", "w5 w6 w7", "--max-new-tokens", "12", "--json"]
        outputs = []
        for flags in (["--adapter", "me/heads"], ["--adapter", str(run / "adapter")], ["--method", "autoregressive"]):
            assert infer([*arguments, *flags]) == 0
            outputs.append(json.loads(capfd.readouterr().out)["token_ids"])
        assert outputs[0] == outputs[1] == outputs[2]

    @pytest.mark.parametrize("flags", [[], ["--dry-run"]])
    def test_the_token_is_asked_about_before_the_training(
        self,
        hub: FakeHub,
        recipe: Path,
        tmp_path: Path,
        flags: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", READER)
        command = ["--recipe", str(recipe), "--output", str(tmp_path / "run"), "--push-to-hub", "me/heads", *flags]
        assert train(command) == 2
        assert "hispec-train: error: the token may only read" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        assert hub.asked("GET", "lab/base") == 0

    def test_a_push_that_fails_leaves_the_adapter_and_says_how_to_go_on(
        self,
        hub: FakeHub,
        base_files: dict[str, bytes],
        recipe: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        hub.add("lab/base", base_files)
        hub.fail("POST", "/commit/", 403)
        run = tmp_path / "run"
        assert train(["--recipe", str(recipe), "--output", str(run), "--push-to-hub", "me/heads"]) == 2
        error = capsys.readouterr().err
        assert f"the adapter is in {run / 'adapter'}, but was not pushed: the hub refused" in error
        command = error.partition("then run `")[2].partition("`")[0]
        assert command == f"hispec-push {run / 'adapter'} me/heads"
        assert main(command.split()[1:]) == 0
        assert local(run / "adapter", CONFIG, WEIGHTS, RUN).items() <= pushed(hub).items()

    def test_private_alone(self, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train(["--recipe", str(recipe), "--private"]) == 2
        assert "--private goes with --push-to-hub only" in capsys.readouterr().err


@pytest.mark.slow
def test_by_the_environment_of_real_processes(
    server: FakeHub, base_files: dict[str, bytes], recipe: Path, tmp_path: Path
) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE as a user sets them."""
    server.reset()
    server.add("lab/base", base_files)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }

    def call(module: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"hispec.{module}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment | more)

    run = tmp_path / "run"
    arguments = ["--recipe", str(recipe), "--output", str(run)]
    trained = call("train", *arguments, "--push-to-hub", "me/heads", HF_TOKEN=WRITER)
    assert trained.returncode == 0, trained.stderr
    arguments = ["--model", "lab/base", "--raw", "--prompt", "w5 w6", "--max-new-tokens", "8", "--json"]
    answer = call("infer", *arguments, "--adapter", "me/heads")
    assert answer.returncode == 0, answer.stderr
    num_requests = len(server.requests)
    offline = call("infer", *arguments, "--adapter", "me/heads", HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout)["token_ids"] == json.loads(answer.stdout)["token_ids"]
    assert len(server.requests) == num_requests
