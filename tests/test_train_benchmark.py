"""The benchmark's three ways compute the same."""

import json

import pytest

from hispec.recipes import recipe_from_dict
from hispec.train.benchmark import WAYS, main, measure, read_some
from hispec.train.responses import write_responses

from .train_support import build_tokenizer, random_responses


@pytest.fixture(scope="module")
def recipe(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    request.getfixturevalue("base").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return recipe_from_dict(
        {
            "model": {"source": str(folder)},
            "heads": {"exit_layers": [0, 2], "draft_vocab_size": 48},
            "training": {"batch_tokens": 64, "learning_rate": 0.001},
        },
        name="tiny",
    )


def test_every_way_ends_at_the_same_losses(recipe):
    responses = random_responses()
    measured = {way: measure(way, recipe, responses, "auto") for way in WAYS}
    for way, result in measured.items():
        assert result.num_tokens == sum(len(response.token_ids) for response in responses)
        assert result.num_steps > 1
        assert (result.cache_seconds > 0) == (way == "cached")
        assert result.peak_memory >= result.start_memory > 0
        assert result.losses == pytest.approx(measured["whole"].losses, rel=1e-3)


def test_what_it_reads_and_refuses(tmp_path, capsys):
    path = tmp_path / "responses.jsonl"
    responses = random_responses()
    write_responses(path, responses)
    assert read_some(path, len(responses[0].token_ids) + 1) == responses[:2]
    assert main(["--responses", str(tmp_path / "none.jsonl")]) == 2
    assert "holds no response" in capsys.readouterr().err
    assert main(["--responses", str(path), "--ways", "cached,other"]) == 2
    assert "the way 'other' is unknown" in capsys.readouterr().err


@pytest.mark.slow
def test_a_way_runs_in_a_process_of_its_own(recipe, tmp_path, capsys):
    write_responses(tmp_path / "responses.jsonl", random_responses())
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe.to_dict()))
    flags = ["--model", str(tmp_path / "tiny.yaml"), "--responses", str(tmp_path / "responses.jsonl"), "--json"]
    assert main([*flags, "--ways", "online"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["way"] for result in results] == ["online"]
