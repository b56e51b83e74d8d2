"""The n-gram index against a search of the whole text, and the method that drafts with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, EngineConfig, SamplingParams
from hispec.infer.ngram_index import NgramIndex

from .models import build_base, build_heads, reference, shallow

MOST = 6
"""Matching tokens that are counted."""
PERIODIC = [7, 8, 9, 10] * 5


def search(token_ids: list[int], min_size: int, max_size: int, count: int) -> tuple[int, list[int]]:
    """What the index must say, by looking everywhere and writing the text on."""
    for size in range(max_size, min_size - 1, -1):
        for start in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[start - size : start] == token_ids[len(token_ids) - size :]:
                text = list(token_ids)
                for place in range(count):
                    text.append(text[start + place])
                while size < MOST and size < start and token_ids[start - size - 1] == token_ids[-size - 1]:
                    size += 1
                return size, text[len(token_ids) :]
    return 0, []


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=8),
    min_size=st.integers(1, 3),
    extra=st.integers(0, 3),
    count=st.integers(0, 6),
)
def test_it_finds_what_a_search_of_the_whole_text_finds(pieces, min_size, extra, count):
    index, text = NgramIndex(min_size, min_size + extra, MOST), []
    for piece in pieces:
        text += piece
        assert index.continuation(text, count) == search(text, min_size, min_size + extra, count)


def test_each_token_is_read_once():
    class Counted(list):
        num_read = 0

        def __getitem__(self, key):
            if isinstance(key, slice):
                Counted.num_read += len(range(*key.indices(len(self))))
            return super().__getitem__(key)

    index, text = NgramIndex(2, 4, MOST), Counted(range(1000))
    index.continuation(text, 4)
    assert 3_900 < Counted.num_read < 5_000
    Counted.num_read = 0
    text.append(5)
    index.continuation(text, 4)
    assert Counted.num_read < 30


@pytest.fixture(scope="module")
def base():
    """Each token follows from the one before alone, so its texts run in circles."""
    return shallow(build_base("llama", tie_word_embeddings=False), 0)


def test_a_text_that_repeats_itself_takes_few_rounds(base):
    model = EarlyExitModel.from_configs(base, [])
    engine = Engine(model, method="ngram", num_ngram_tokens=5, num_blocks=40)
    prompts = [PERIODIC, [3, 9, 27], [5]]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=60, ignore_eos=True))
    assert [completion.token_ids for completion in completions] == [reference(base, prompt, 60) for prompt in prompts]
    draft, target = engine.stats.levels["draft"], engine.stats.levels["target"]
    assert list(engine.stats.levels) == ["draft", "target"]
    assert draft.num_rounds == target.num_drafted
    assert draft.num_layer_passes == 0 < draft.seconds
    assert engine.stats.num_committed == 180 == engine.stats.num_prefills + target.num_accepted + target.num_rounds
    assert target.acceptance_length > 2
    for completion in completions:
        assert set(completion.origins) == {"draft", "target"}
        counts = completion.stats.levels["target"]
        # The text may end inside a draft that the target kept.
        assert 0 <= counts.num_accepted - completion.origins.count("draft") <= 1


def test_it_finds_its_drafts_again_after_giving_way(base):
    model = build_heads(base, "random")
    engine = Engine(model, method="ngram", num_ngram_tokens=4, num_blocks=12, block_size=8, max_num_seqs=4)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [PERIODIC, [3, 9, 27], [5, 6]]
    completions = engine.generate(prompts, params)
    assert [completion.token_ids for completion in completions] == [reference(base, prompt, 40) for prompt in prompts]
    assert engine.stats.num_prefills > 3


def test_nothing_is_indexed_for_other_methods(base):
    engine = Engine(EarlyExitModel.from_configs(base, []), method="autoregressive", num_blocks=20)
    request_id = engine.add_request([5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine._unfinished[request_id][0].ngram_index is None


@pytest.mark.parametrize(
    ("values", "message"),
    [({"min_ngram": 0}, "min_ngram is 0"), ({"min_ngram": 5}, "max_ngram is 4, less than min_ngram, 5")],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)
