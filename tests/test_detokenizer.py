"""Streamed text is the whole text, in whole characters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hispec.heads import EarlyExitModel
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


def merged_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges, some of which cut a character, and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["une tête d'été 日本の日 🙂🙃 the end\n  of it"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def sentencepiece_tokenizer(decoder: str) -> PreTrainedTokenizerFast:
    """As of Llama 2 (`strip`: the first space goes), of Gemma (`keep`) or with tokenizers' own metaspace decoder."""
    space = "\u2581"
    pieces = [space, space * 2, f"{space}a", "a", "b", f"{space}b", "日", f"{space}日", ".", "\ufffd", f"a{space}"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(space, space), (space, "a"), (space, "b"), (space, "日"), ("a", space)]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if decoder == "keep" else "first")
    replace = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        {
            "strip": [*replace, decoders.Strip(" ", 1, 0)],
            "keep": replace,
            "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
        }[decoder]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    # Special to `decode`, but none of the named special tokens.
    fast.add_tokens([AddedToken("<|tool|>", special=True, normalized=False)])
    return fast


TOKENIZER = byte_tokenizer()
TOKENIZERS = {
    "bytes": TOKENIZER,
    "byte-level": merged_tokenizer(),
    "words": build_tokenizer(),
    **{name: sentencepiece_tokenizer(name) for name in ("strip", "keep", "metaspace")},
}
TEXT = st.text(alphabet="aé日🙂 \nb.", max_size=16)
SIZES = st.lists(st.integers(0, 4), min_size=1).filter(any)


def push_all(tokenizer: PreTrainedTokenizerFast, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces of pushes of these sizes, again and again, and of the end."""
    detokenizer, pieces, start = Detokenizer(tokenizer), [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=SIZES)
def test_any_tokens_make_the_whole_text(name, data, sizes):
    """Wrong bytes, cut characters, spaces and special tokens anywhere."""
    tokenizer = TOKENIZERS[name]
    rare = st.sampled_from([*range(3), *range(len(tokenizer) - 14, len(tokenizer))])
    # In tokenizers with byte fallback ids 3 to 258 are bytes: continuation bytes, and starts of 2 to 4 bytes.
    byte = st.sampled_from([3 + 0x20, 3 + 0x0A, 3 + 0x99, 3 + 0x82, 3 + 0x9F, 3 + 0xC3, 3 + 0xE2, 3 + 0xF0])
    anything = st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(rare | byte.filter(lambda i: i < len(tokenizer)) | anything, max_size=24))
    assert "".join(push_all(tokenizer, ids, sizes)) == decode(tokenizer, ids)


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"words"}))
@settings(max_examples=40, deadline=None)
@given(text=TEXT, sizes=SIZES)
def test_pieces_of_a_text_are_whole_characters(name, text, sizes):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = push_all(tokenizer, ids, sizes)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == decode(tokenizer, ids)


def test_a_special_token_ends_no_run_of_bytes():
    """The wrong byte behind it still spoils the bytes before it, for the tokenizer that decodes the whole."""
    tokenizer = TOKENIZERS["strip"]
    ids = [3 + 0xC3, 3 + 0xA9, tokenizer.convert_tokens_to_ids("<|tool|>"), 3 + 0xFF]
    assert decode(tokenizer, ids[:3]) == "é"
    assert "".join(push_all(tokenizer, ids, [1])) == decode(tokenizer, ids) == REPLACEMENT * 3


def test_an_emoji_of_four_tokens_comes_at_once():
    for tokenizer, before in ((TOKENIZER, "a"), (TOKENIZERS["strip"], "a")):
        ids = tokenizer("a🙂a")["input_ids"]
        pieces = push_all(tokenizer, ids, [1])
        assert pieces[:4] == [before, "", "", ""]
        assert [piece for piece in pieces if piece] in (["a", "🙂", "a"], ["a", "🙂a"])


@pytest.mark.parametrize("name", ["byte-level", "strip", "metaspace"])
def test_a_random_models_stream_is_its_completion(make_base, name):
    """A random model says all kinds of bytes."""
    base = make_base("llama", vocab_size=259, num_hidden_layers=3)
    engine = Engine(EarlyExitModel.from_base(base, (1, 2)), TOKENIZERS[name], num_blocks=20)
    for seed in range(4):
        params = SamplingParams(max_new_tokens=40, temperature=2.0, seed=seed, ignore_eos=True)
        completion = engine.generate([[3, 4, 5]], params)[0]
        deltas = list(engine.stream([3, 4, 5], params))
        assert (
            "".join(delta.text for delta in deltas) == completion.text == decode(TOKENIZERS[name], completion.token_ids)
        )
        assert [token_id for delta in deltas for token_id in delta.token_ids] == completion.token_ids
        assert [origin for delta in deltas for origin in delta.origins] == completion.origins
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


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
    assert detokenizer.push(ids) == "a"
    assert "a" + detokenizer.finish() == decode(TOKENIZER, ids)


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
