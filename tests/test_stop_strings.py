"""Stop strings: found wherever they lie, text and ids cut exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hispec.infer import Engine, SamplingParams
from hispec.infer.detokenizer import decode
from hispec.infer.stop_strings import StopStrings

from .models import build_heads, shallow
from .test_detokenizer import TOKENIZER
from .train_support import build_tokenizer

METHODS = ["autoregressive", "single-layer", "hispec"]
PROMPT = [5, 9, 5, 33, 40]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=14),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), min_size=1, max_size=3),
    include=st.booleans(),
    num_early=st.integers(0, 4),
)
def test_the_first_stop_string_ends_the_text(text, stop, include, num_early):
    ids = TOKENIZER(text)["input_ids"]
    watcher = StopStrings(TOKENIZER, stop, include_stop=include, min_new_tokens=num_early)
    sent, used, has_ended = "", 0, False
    for token_id in ids:
        used += 1
        has_ended = watcher.push(token_id)
        assert watcher.certain.startswith(sent)
        sent = watcher.certain
        if has_ended:
            break
    watcher.finish()
    assert watcher.certain.startswith(sent)
    assert watcher.certain == watcher.text
    # By hand: after which token does the decoded text hold a stop string that was not whole before?
    expected, number = text, len(ids)
    for count in range(max(1, num_early), len(ids) + 1):
        before, now = (TOKENIZER.decode(ids[:n]).rstrip("\N{REPLACEMENT CHARACTER}") for n in (count - 1, count))
        new = [(now.find(s, max(0, len(before) - len(s) + 1)), s) for s in stop]
        new = [(place, s) for place, s in new if place >= 0]
        if new:
            place, found = min(new, key=lambda match: match[0])
            expected, number = now[: place + len(found) * include], count
            assert (has_ended, watcher.found) == (True, found)
            break
    else:
        assert not has_ended
        assert watcher.found is None
    assert (watcher.text, used) == (expected, number)


@pytest.fixture(scope="module")
def model(base):
    return build_heads(shallow(base, 2), "good", committed_context=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_a_stop_string_anywhere_in_a_draft(model, method, include, place):
    engine = Engine(model, build_tokenizer(), method=method, num_draft_tokens=4, num_provisional_tokens=6)
    free = engine.generate([PROMPT], SamplingParams(max_new_tokens=24, ignore_eos=True))[0]
    words = free.text.split()
    # Over two tokens, from the middle of the one to the middle of the next.
    stop = f"{words[place][1:]} {words[place + 1][:2]}"
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=["never", stop], include_stop=include)
    completion = engine.generate([PROMPT], params)[0]
    end = free.text.index(stop)
    assert completion.text == free.text[: end + len(stop) * include]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
    assert stop in decode(engine.tokenizer, completion.token_ids)
    assert stop not in decode(engine.tokenizer, completion.token_ids[:-1])
    assert "".join(delta.text for delta in engine.stream(PROMPT, params)) == completion.text
    assert engine._scheduler._block_manager.num_free == engine._scheduler._block_manager.num_blocks


@pytest.mark.parametrize("method", METHODS)
def test_it_does_not_count_before_min_new_tokens(model, method):
    engine = Engine(model, build_tokenizer(), method=method)
    free = engine.generate([PROMPT], SamplingParams(max_new_tokens=24, ignore_eos=True))[0]
    stop = free.text.split()[1]
    params = SamplingParams(max_new_tokens=24, min_new_tokens=4, ignore_eos=True, stop=stop)
    completion = engine.generate([PROMPT], params)[0]
    assert len(completion.token_ids) >= 4
    assert completion.text.startswith(" ".join(free.text.split()[:3]))


def test_without_a_tokenizer_there_are_none(model):
    with pytest.raises(ValueError, match="no tokenizer to find stop strings with"):
        Engine(model).generate([PROMPT], SamplingParams(stop="a"))
