"""Regeneration: resumable, and the same however often it was interrupted."""

import json

import pytest
import torch

from hispec.heads import EarlyExitModel
from hispec.infer import Engine
from hispec.train.prompts import is_held_out, read_prompts
from hispec.train.responses import next_items, read_responses, regenerate, response_order, write_responses

from .train_support import build_tokenizer, write_prompts

FRACTION = 0.2


@pytest.fixture(scope="module")
def engine(request):
    base = request.getfixturevalue("base")
    model = EarlyExitModel.from_configs(base, [])
    return Engine(model, build_tokenizer(), method="autoregressive", max_num_seqs=4, num_blocks=40)


@pytest.fixture
def order(tmp_path):
    prompts = read_prompts(write_prompts(tmp_path / "prompts.jsonl"))
    return response_order(prompts, greedy=True, num_sampled=1, held_out_fraction=FRACTION, seed=0)


def run(engine, order, path, num_tokens=150):
    return regenerate(
        engine,
        order,
        path,
        num_tokens=num_tokens,
        max_new_tokens=16,
        temperature=1.0,
        max_num_seqs=4,
        seed=0,
    )


class KilledError(Exception):
    pass


class Interrupting:
    """An engine that stops after some steps."""

    def __init__(self, engine, num_steps):
        self.engine, self.num_steps = engine, num_steps

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def step(self):
        if self.num_steps == 0:
            raise KilledError
        self.num_steps -= 1
        return self.engine.step()


def test_order_has_every_item_once_and_any_beginning_is_mixed(order):
    keys = [(prompt.id, sample) for prompt, sample in order]
    assert len(set(keys)) == len(keys) == 24
    assert {prompt.id for prompt, _ in order[:12]} == {prompt.id for prompt, _ in order}
    assert [sample for _, sample in order[:4]] == [0, 1, 0, 1]
    assert len({is_held_out(prompt.id, FRACTION) for prompt, _ in order[:2]}) == 2


def test_greedy_response_is_the_base_models_own(engine, order, tmp_path):
    responses = run(engine, order, tmp_path / "r.jsonl")
    base = engine.model.base
    for response in [response for response in responses if response.sample == 0][:4]:
        prompt = torch.tensor([response.prompt_token_ids])
        with torch.no_grad():
            expected = base.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
        assert response.token_ids == expected.tolist()


def test_ends_at_the_wanted_number_of_tokens(engine, order, tmp_path):
    counts = [len(response.token_ids) for response in run(engine, order, tmp_path / "r.jsonl")]
    assert sum(counts[:-1]) < 150 <= sum(counts)


def test_says_so_when_the_prompts_do_not_suffice(engine, order, tmp_path, capsys):
    responses = run(engine, order[:3], tmp_path / "r.jsonl", num_tokens=10_000)
    assert len(responses) == 3
    assert "10000 were wanted" in capsys.readouterr().err


@pytest.mark.parametrize("num_steps", [3, 17, 30, 45])
def test_interrupted_run_ends_with_the_same_responses(engine, order, tmp_path, num_steps):
    expected = run(engine, order, tmp_path / "whole.jsonl")
    path = tmp_path / "r.jsonl"
    with pytest.raises(KilledError):
        run(Interrupting(engine, num_steps), order, path)
    assert not engine.has_unfinished
    with path.open("a") as file:  # a line that the kill tore
        file.write('{"prompt_id": "p1", "kin')
    assert run(engine, order, path) == expected
    assert list(read_responses(path))[: len(expected)] == expected


def test_what_is_there_is_not_made_again(engine, order, tmp_path):
    path = tmp_path / "r.jsonl"
    run(engine, order, path)
    content = path.read_bytes()
    nothing = Interrupting(engine, 0)
    assert run(nothing, order, path) == run(engine, order, path)
    shorter = run(nothing, order, path, num_tokens=20)
    assert shorter == list(read_responses(path))[: len(shorter)]
    assert path.read_bytes() == content
    longer = run(engine, order, path, num_tokens=220)
    assert path.read_bytes().startswith(content)
    assert len(longer) > len(content.splitlines())


class Recording:
    """An engine that notes what it is asked for."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def add_request(self, prompt, params):
        self.asked.append((tuple(prompt), params.seed is None))
        return self.engine.add_request(prompt, params)


def test_no_answer_is_lost_or_made_twice(engine, order, tmp_path):
    """An interruption, then fewer tokens, then all of them again."""
    expected = run(engine, order, tmp_path / "whole.jsonl")
    path = tmp_path / "r.jsonl"
    # In the order of completion, with gaps where longer ones were not finished.
    kept = [expected[place] for place in (3, 1, 6, 5)]
    write_responses(path, kept)
    for num_tokens in (20, 150):
        recording = Recording(engine)
        responses = run(recording, order, path, num_tokens)
        assert responses == expected[: len(responses)]
        assert {(tuple(r.prompt_token_ids), r.sample == 0) for r in kept}.isdisjoint(recording.asked)
        now = list(read_responses(path))
        assert all(response in now for response in kept)
        kept = now
    assert responses == expected


def test_answers_far_behind_are_not_waited_for(engine, order, tmp_path):
    whole = run(engine, order, tmp_path / "whole.jsonl", num_tokens=10_000)
    path = tmp_path / "r.jsonl"
    write_responses(path, [whole[-1]])
    few = run(engine, order, path, num_tokens=40)
    assert few == whole[: len(few)]
    # Some more are begun while nobody knows how long those that run will be.
    assert len(list(read_responses(path))) <= len(few) + 1 + 4 < len(order) / 2
    write_responses(path, [whole[-1]])
    assert len(next_items(path, order, 40, 16)) <= len(few) + 1


def test_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt_id": "a"}) + "\n{}\n")
    with pytest.raises(ValueError, match=r"r\.jsonl line 1 is not a response"):
        list(read_responses(path))
