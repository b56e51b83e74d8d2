"""The verifier of a draft exit: what it learns, its files, and the command that fits it."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hispec.checkpoints import load_adapter, load_verifier, save_adapter, save_verifier, verifier_file
from hispec.checkpoints.atomic import write_atomically
from hispec.heads import DraftVerifier, draft_features, num_features
from hispec.infer import Engine, SamplingParams
from hispec.train import OnlineStates
from hispec.train.draft_verifier import Judgements, area_under_curve, collect, fit, measure
from hispec.train.evaluate import level_scores
from hispec.train.prompts import is_held_out
from hispec.train.responses import write_responses
from hispec.train.sprinter import choose_responses, main
from hispec.train.windows import random_windows

from .models import build_heads, shallow
from .train_support import build_tokenizer, random_responses, small_disk

CONFIG, WEIGHTS = "draft_verifier.json", "draft_verifier.safetensors"


def planted(num_rows, seed, strength):
    """Rows whose acceptance depends on three of their features, in scales far apart."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, 35, generator=generator) * torch.logspace(-2, 2, 35) + torch.arange(35.0)
    signal = strength * ((features - torch.arange(35.0)) / torch.logspace(-2, 2, 35))[:, [0, 17, 34]].sum(-1)
    return Judgements(features, torch.rand(num_rows, generator=generator) < (signal - 0.5).sigmoid())


def test_it_finds_a_planted_signal_and_nothing_where_there_is_none():
    verifier = fit(planted(3000, 0, 1.5), 2, reads_state=True)
    measured = measure(verifier, planted(3000, 1, 1.5))
    assert measured["loss"] < measured["loss_without"] - 0.15
    assert measured["auc"] > 0.85
    rising = [row["right"] for row in measured["thresholds"]]
    assert rising == sorted(rising)
    assert [row["trusted"] for row in measured["thresholds"]] == sorted(
        (row["trusted"] for row in measured["thresholds"]), reverse=True
    )
    # Calibrated: of all it holds likely by so much, so many are accepted.
    probs = verifier.of_features(planted(3000, 1, 1.5).features)
    assert probs.mean().item() == pytest.approx(measured["accepted"], abs=0.03)
    chance = measure(fit(planted(3000, 0, 0.0), 2, reads_state=True), planted(3000, 1, 0.0))
    assert chance["auc"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("num_accepted", [0, 20])
def test_nothing_to_tell_apart(num_accepted):
    labels = torch.arange(20) < num_accepted
    with pytest.raises(ValueError, match=f"{num_accepted} of 20 tokens accepted, so there is nothing to tell apart"):
        fit(Judgements(torch.randn(20, 35), labels), 2)


def test_area_under_curve_counts_pairs():
    scores = torch.randint(0, 6, (60,), generator=torch.Generator().manual_seed(0)).double()
    labels = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.4
    pairs = scores[labels][:, None] - scores[~labels][None]
    assert area_under_curve(scores, labels) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).double().mean().item())
    assert area_under_curve(scores, labels | True) is None


@pytest.mark.parametrize("draft_vocab_size", [None, 40, 1])
def test_features_are_finite_and_what_they_say(draft_vocab_size):
    logits = torch.randn(5, draft_vocab_size or 64) * 4
    logits[0, 0] = 60  # as sure as float32 can be
    features = draft_features(torch.randn(5, 32), logits)
    assert features.shape == (5, num_features(32))
    assert features.isfinite().all()
    top = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(features[:, -1], top.entropy(), rtol=1e-4, atol=1e-5)
    if draft_vocab_size != 1:
        highest = top.probs.sort(-1, descending=True).values
        torch.testing.assert_close(features[:, -2], highest[:, 0] - highest[:, 1])


@pytest.fixture(scope="module")
def model(base):
    return build_heads(shallow(base, 3), "random", (2, 4), committed_context=True, draft_vocab_size=60)


@pytest.mark.parametrize("exit_index", [0, 1])
def test_rows_are_judged_as_in_evaluation(model, exit_index):
    states = OnlineStates(random_responses())
    found = collect(model, states, range(20), exit_index=exit_index, batch_tokens=10**6, seed=5)
    batch = states.read(range(20), model.exit_layers, model.backbone)
    scores = level_scores(model, batch, random_windows(batch.lengths, batch.spans, 8, 5))
    exit_layer = model.exit_layers[exit_index]
    assert torch.equal(found.is_accepted, scores.hops[f"{exit_layer}->target"][0].bool())
    odds = found.features[:, -3].sigmoid()
    torch.testing.assert_close(odds, scores.confidence[str(exit_layer)], rtol=1e-4, atol=1e-5)
    assert 0 < found.is_accepted.float().mean() < 1
    in_parts = collect(model, states, range(20), exit_index=exit_index, batch_tokens=30, seed=5)
    assert in_parts.features.shape == found.features.shape


def test_it_ranks_a_real_exits_tokens_better_than_chance(base):
    model = build_heads(shallow(base, 3), "good", (1,))
    states = OnlineStates(random_responses(120))
    judged = collect(model, states, range(90)), collect(model, states, range(90, 120))
    measured = measure(fit(judged[0], 1), judged[1])
    assert measured["auc"] > 0.6
    assert measured["loss"] < measured["loss_without"] - 0.03


class TestFiles:
    @pytest.fixture
    def folder(self, model, tmp_path):
        """An adapter with a verifier."""
        save_adapter(model, tmp_path / "heads")
        self.save(tmp_path / "heads", 1)
        return tmp_path / "heads"

    @staticmethod
    def save(folder, seed):
        weight = torch.randn(35, generator=torch.Generator().manual_seed(seed))
        verifier = DraftVerifier(exit_layer=2, weight=weight, bias=torch.tensor(0.25))
        save_verifier(verifier, folder, measured={"auc": 0.5}, run={})
        return verifier

    def test_there_and_back(self, folder, model):
        saved, found = self.save(folder, 2), load_verifier(folder)
        assert (found.exit_layer, found.bias) == (2, saved.bias)
        assert torch.equal(found.weight, saved.weight)
        assert sorted(path.name for path in folder.iterdir()) == [
            *("adapter_config.json", "adapter_model.safetensors", CONFIG, WEIGHTS)
        ]
        loaded = load_adapter(folder, base=model.base)
        engine = Engine(loaded, method="sprinter", lossy=True, num_blocks=20)
        assert torch.equal(engine._hierarchy._proposer._verifier.weight, saved.weight)

    def test_new_heads_in_the_folder_take_the_verifier_away(self, folder, model):
        save_adapter(model, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]

    @staticmethod
    def change_config(folder, **changes):
        values = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({name: value for name, value in values.items() if value != "drop"}))

    def change_tensors(self, folder, **tensors):
        """With the digest that belongs to them."""
        save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS)
        digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        self.change_config(folder, tensors_sha256=digest)

    @pytest.mark.parametrize(
        ("harm", "message"),
        [
            (lambda test, folder: (folder / CONFIG).unlink(), "has no verifier, which method 'sprinter' needs"),
            (lambda test, folder: (folder / CONFIG).write_text('{"format'), "is not readable JSON"),
            (lambda test, folder: (folder / CONFIG).write_text("[]"), "its keys are not"),
            (lambda test, folder: test.change_config(folder, more=1), "its keys are not"),
            (lambda test, folder: test.change_config(folder, run="drop"), "its keys are not"),
            (lambda test, folder: test.change_config(folder, format_version=2), "has format version 2, known is 1"),
            (lambda test, folder: test.change_config(folder, exit_layer="2"), "exit_layer is '2', no whole number"),
            (lambda test, folder: test.change_config(folder, confidence_features=[]), "names other features than"),
            (lambda test, folder: (folder / WEIGHTS).unlink(), "is missing or broken"),
            (lambda test, folder: (folder / WEIGHTS).write_bytes(b"\x80\x04."), "is missing or broken"),
            (
                lambda test, folder: save_file({"weight": torch.ones(35)}, folder / WEIGHTS),
                f"is not the file that {CONFIG} belongs to",
            ),
            (lambda test, folder: test.change_tensors(folder, more=torch.ones(1)), "not one weight and one bias"),
            (lambda test, folder: test.change_tensors(folder, weight=torch.ones(5, 7)), "not one weight and one bias"),
            (lambda test, folder: test.change_tensors(folder, bias=torch.tensor(1)), "not one weight and one bias"),
            (lambda test, folder: test.change_tensors(folder, bias=torch.tensor(float("nan"))), "holds NaN"),
            (
                lambda test, folder: save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors"),
                "was fitted to other heads than lie there now",
            ),
        ],
    )
    def test_what_is_not_wholly_a_verifier_of_these_heads_is_refused(self, folder, harm, message):
        harm(self, folder)
        with pytest.raises(ValueError, match=message) as raised:
            load_verifier(folder)
        assert "fit one: python -m hispec.train.sprinter --adapter" in str(raised.value)

    def test_other_methods_do_without_it(self, folder, model):
        (folder / CONFIG).write_text("{")
        loaded = load_adapter(folder, base=model.base)
        Engine(loaded, method="single-layer", num_blocks=20)
        with pytest.raises(ValueError, match="is not readable JSON"):
            Engine(loaded, method="sprinter", lossy=True, num_blocks=20)

    def test_a_full_disk_leaves_the_old_one(self, folder):
        before = load_verifier(folder)
        with small_disk(100), pytest.raises(ValueError, match="cannot write the verifier to"):
            self.save(folder, 3)
        assert torch.equal(load_verifier(folder).weight, before.weight)

    def test_killed_between_the_two_files_there_is_none(self, folder, monkeypatch):
        def killed(path, content):
            if path.name == CONFIG:
                raise KeyboardInterrupt
            write_atomically(path, content)

        monkeypatch.setattr(verifier_file, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            self.save(folder, 3)
        with pytest.raises(ValueError, match=f"is not the file that {CONFIG} belongs to; fit one:"):
            load_verifier(folder)


@pytest.fixture(scope="module")
def places(base, tmp_path_factory):
    """A base, an adapter for it, responses, and the flags that name them."""
    folder = tmp_path_factory.mktemp("sprinter")
    base = shallow(base, 3)
    base.save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    save_adapter(build_heads(base, "good", (2, 4), draft_vocab_size=60), folder / "adapter")
    write_responses(folder / "responses.jsonl", random_responses(200))
    flags = {"--model": folder / "base", "--adapter": folder / "adapter", "--responses": folder / "responses.jsonl"}
    return folder, {name: str(value) for name, value in flags.items()}


class TestCommand:
    @staticmethod
    def run(flags, *more):
        return main([part for item in flags.items() for part in item] + [*more])

    def test_it_fits_measures_and_puts_it_beside_the_adapter(self, places, capfd):
        folder, flags = places
        assert self.run(flags, "--num-tokens", "1500", "--held-out-fraction", "1", "--with-state", "--json") == 0
        measured = json.loads(capfd.readouterr().out)
        assert measured["auc"] > 0.55
        assert json.loads((folder / "adapter" / CONFIG).read_text())["measured"] == measured
        options = {"method": "sprinter", "lossy": True, "num_blocks": 40}
        engine = Engine.from_pretrained(flags["--model"], flags["--adapter"], dtype="float32", **options)
        engine.generate([[5], [9, 9, 4]], SamplingParams(max_new_tokens=30, ignore_eos=True))
        assert engine.stats.num_skipped
        assert str(folder) not in (folder / "adapter" / CONFIG).read_text()
        assert self.run(flags, "--num-tokens", "400", "--held-out-fraction", "1", "--exit-layer", "4") == 0
        assert "AUC" in capfd.readouterr().out
        assert load_verifier(folder / "adapter").exit_layer == 4

    def test_nothing_is_written_before_the_end(self, places, monkeypatch, capfd):
        folder, flags = places
        before = {path.name: path.read_bytes() for path in (folder / "adapter").iterdir()}

        def interrupt(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr("hispec.train.sprinter.fit", interrupt)
        assert self.run(flags, "--num-tokens", "200", "--held-out-fraction", "1") == 130
        assert "interrupted; nothing was written" in capfd.readouterr().err
        assert {path.name: path.read_bytes() for path in (folder / "adapter").iterdir()} == before

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"--adapter": "/nowhere"}, "the adapter /nowhere is no folder here; give --adapter FOLDER"),
            ({"--responses": "/nowhere.jsonl"}, "there is no file /nowhere.jsonl"),
            (
                {"--exit-layer": "3", "--held-out-fraction": "1"},
                "exit layer 3 has no head; the adapter has exits at 2,4",
            ),
            ({"--num-tokens": "0"}, "num_tokens is 0"),
            ({"--held-out-fraction": "2"}, "held_out_fraction is 2.0; it must be above 0"),
        ],
    )
    def test_what_the_user_can_mend(self, places, capfd, changes, message):
        assert self.run(places[1] | changes) == 2
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("hispec.train.sprinter: error: ")
        assert message in error

    def test_responses_are_those_of_held_out_prompts(self, places):
        path = places[0] / "responses.jsonl"
        parts = choose_responses(path, 0.6, 400)
        names = [{response.prompt_id for response in part} for part in parts]
        assert not names[0] & names[1]
        assert all(is_held_out(name, 0.6) for name in names[0] | names[1])
        for part in parts:
            assert 200 <= sum(response.num_answer_tokens for response in part) < 224
        with pytest.raises(ValueError, match="holds responses to 0 prompts that were held out"):
            choose_responses(path, 1e-9, 400)
