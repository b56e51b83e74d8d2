"""Streamed text is the whole text, in whole characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hispec.infer import Engine, SamplingParams
from hispec.infer.detokenizer import REPLACEMENT, Detokenizer, decode

from .models import build_heads, shallow
from .train_support import build_tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character past ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_tokenizer()


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="aé日🙂 \n", max_size=12), sizes=st.lists(st.integers(1, 4), min_size=1))
def test_the_pieces_are_whole_and_make_the_whole(text, sizes):
    ids = TOKENIZER(text)["input_ids"]
    detokenizer, pieces, start = Detokenizer(TOKENIZER), [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == decode(TOKENIZER, ids) == text


def test_a_leading_space_survives_empty_pushes():
    words = ["<unk>", "\u2581one", "\u2581two"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    detokenizer = Detokenizer(fast)
    pieces = [detokenizer.push(ids) for ids in ([1], [], [2], [], [1])]
    assert "".join(pieces) + detokenizer.finish() == decode(fast, [1, 2, 1]) == "one two one"


def test_a_character_cut_off_at_the_end_still_comes_out():
    ids = TOKENIZER("a🙂")["input_ids"][:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == decode(TOKENIZER, ids)


@pytest.mark.parametrize("method", ["autoregressive", "hispec"])
def test_a_stream_is_the_completion(base, method):
    model = build_heads(shallow(base, 2), "good")
    engine = Engine(model, build_tokenizer(), method=method)
    params = SamplingParams(max_new_tokens=20)
    completion = engine.generate([[3, 4, 5]], params)[0]
    deltas = list(engine.stream([3, 4, 5], params))
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert len(deltas) > 1


def test_a_stream_that_is_left_gives_everything_back(base):
    engine = Engine(build_heads(base, "good"), build_tokenizer(), num_blocks=10)
    next(iter(engine.stream([3, 4, 5], SamplingParams(max_new_tokens=50, ignore_eos=True))))
    assert not engine.has_unfinished
    assert engine._scheduler._block_manager.num_free == 10
