"""Whose choice each token was, and what a streamer of transformers is given."""

import pytest
import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from hispec.infer import Engine, SamplingParams

from .models import build_heads, shallow
from .train_support import build_tokenizer

PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPTS = [[3, 4, 5], [9], [8, 7, 6, 5, 4, 3, 9, 9, 10, 11, 12]]


def count(completions, name):
    return sum(completion.origins.count(name) for completion in completions)


@pytest.mark.parametrize("method", ["autoregressive", "single-layer", "hispec"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}])
def test_origins_agree_with_the_counts(base, method, sampling):
    engine = Engine(build_heads(shallow(base, 3), "random", committed_context=True), method=method, num_blocks=40)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True, **sampling))
    assert all(len(completion.origins) == len(completion.token_ids) for completion in completions)
    target = engine.stats.levels["target"]
    assert count(completions, "target") == engine.stats.num_prefills + target.num_rounds
    assert count(completions, "draft") + count(completions, "intermediate") == target.num_accepted
    if method == "single-layer":
        assert count(completions, "draft") == target.num_accepted > 0


def test_a_token_of_the_intermediate_level_keeps_its_name(base):
    """A perfect intermediate level: what it accepts and what it adds itself are both committed, to the last token."""
    engine = Engine(build_heads(shallow(base, 4), "good"), num_blocks=40)
    completions = engine.generate(PROMPTS, PARAMS)
    middle, target = engine.stats.levels["intermediate"], engine.stats.levels["target"]
    assert target.acceptance_rate == 1
    assert 0 < middle.num_accepted < middle.num_drafted
    assert count(completions, "draft") == middle.num_accepted
    assert count(completions, "intermediate") == middle.num_rounds
    assert all(completion.origins[0] == "target" for completion in completions)


def test_a_draft_that_is_never_right_has_no_token(base):
    engine = Engine(build_heads(base, "adversarial"), method="single-layer", num_blocks=40)
    completion = engine.generate([PROMPTS[0]], PARAMS)[0]
    assert completion.origins == ["target"] * 20


def test_origins_survive_a_preemption(base):
    model = build_heads(shallow(base, 4), "good")
    engine = Engine(model, num_blocks=10, block_size=4, max_num_seqs=3)
    completions = engine.generate(PROMPTS, PARAMS)
    assert engine.stats.num_prefills > len(PROMPTS)
    assert count(completions, "target") == engine.stats.num_prefills + engine.stats.levels["target"].num_rounds


def test_a_follower_gets_the_completion_and_step_does_not(base):
    engine = Engine(build_heads(shallow(base, 3), "random"), build_tokenizer(), num_blocks=40)
    expected = engine.generate(PROMPTS[:2], PARAMS)
    followed, other = (engine.add_request(prompt, PARAMS) for prompt in PROMPTS[:2])
    follower = engine.follow(followed)
    assert follower.read() is None
    finished, deltas = [], []
    while engine.has_unfinished:
        finished += engine.step()
        deltas += [delta for delta in [follower.read()] if delta is not None]
    assert [completion.request_id for completion in finished] == [other]
    assert follower.completion.token_ids == expected[0].token_ids
    assert "".join(delta.text for delta in deltas) == expected[0].text
    assert follower.stats.num_committed == 20
    with pytest.raises(ValueError, match="no unfinished request"):
        engine.follow(followed)


class Recorder(BaseStreamer):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.num_ends = 0

    def put(self, value):
        assert self.num_ends == 0
        self.values.append(value)

    def end(self):
        self.num_ends += 1


def test_a_streamer_gets_the_prompt_then_each_round_then_the_end(base):
    engine = Engine(build_heads(shallow(base, 3), "good"), num_blocks=40)
    recorder = Recorder()
    completion = engine.generate([PROMPTS[0]], PARAMS, streamer=recorder)[0]
    prompt, *rounds = recorder.values
    assert prompt.tolist() == [PROMPTS[0]]
    assert torch.cat(rounds).tolist() == completion.token_ids
    assert max(map(len, rounds)) > 1
    assert recorder.num_ends == 1


def test_transformers_own_streamer_prints_the_text(base, capsys):
    tokenizer = build_tokenizer()
    engine = Engine(build_heads(shallow(base, 3), "good"), tokenizer, num_blocks=40)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    completion = engine.generate(["w3 w4 w5"], PARAMS, streamer=streamer)[0]
    assert capsys.readouterr().out == completion.text + "\n"


@pytest.mark.parametrize("num_prompts", [0, 2])
def test_a_streamer_takes_one_prompt(base, num_prompts):
    engine = Engine(build_heads(base, "good"), num_blocks=40)
    with pytest.raises(ValueError, match=f"one prompt and one text at a time, and there are {num_prompts} prompts"):
        engine.generate(PROMPTS[:num_prompts], PARAMS, streamer=Recorder())


def test_a_streamer_that_fails_leaves_nothing_behind(base):
    engine = Engine(build_heads(base, "good"), num_blocks=40)
    for place in (0, 2):
        recorder = Recorder()
        recorder.put = lambda value, place=place, recorder=recorder: (
            recorder.values.append(value) if len(recorder.values) < place else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            engine.generate([PROMPTS[0]], PARAMS, streamer=recorder)
        assert not engine.has_unfinished
        assert engine._scheduler._block_manager.num_free == 40
