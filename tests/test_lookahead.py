"""Lookahead decoding: pool and window as pure functions, and that guesses of any kind change no text."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, EngineConfig, SamplingParams
from hispec.infer import lookahead as lookahead_module
from hispec.infer.block_manager import BlockManager
from hispec.infer.jacobi_window import add_columns, completed_ngrams, first_columns, next_columns
from hispec.infer.lookahead import Lookahead
from hispec.infer.model_runner import ModelRunner
from hispec.infer.ngram_pool import NgramPool
from hispec.infer.scheduler import Scheduler
from hispec.infer.token_tree import TokenTree

from .models import build_base, build_heads, reference, shallow
from .test_lossless_sampling import SAMPLINGS, deviations, is_lossless, sample
from .test_lossless_sampling import model as build_sampled_model
from .train_support import build_tokenizer

PERIODIC = [7, 8, 9, 10] * 5
PROMPTS = [PERIODIC, [3, 9, 27], [5], [11, 12] * 9]
FREE = SamplingParams(max_new_tokens=40, ignore_eos=True)
SMALL = {"lookahead_window": 2, "lookahead_ngram": 3, "lookahead_candidates": 3}

sampled_model = build_sampled_model


@given(
    ngrams=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), max_size=40),
    max_each=st.integers(1, 4),
    max_first_tokens=st.integers(1, 5),
)
def test_the_pool_holds_the_newest_of_each_first_token(ngrams, max_each, max_first_tokens):
    pool = NgramPool(max_each, max_first_tokens)
    held: list[tuple[int, ...]] = []
    for ngram in map(tuple, ngrams):
        pool.add(ngram)
        # By searching the whole history: newest first, each once; a first token that gave way has lost its own.
        held = [ngram, *(other for other in held if other != ngram)]
        firsts = list(dict.fromkeys(other[0] for other in held))[:max_first_tokens]
        held = [
            other
            for place, other in enumerate(held)
            if other[0] in firsts and sum(before[0] == other[0] for before in held[:place]) < max_each
        ]
        for first in range(5):
            assert pool.rests(first) == [other[1:] for other in held if other[0] == first]


WINDOWS = {"num_columns": st.integers(1, 6), "length": st.integers(1, 4)}


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=12), **WINDOWS)
def test_a_window_is_a_tree_of_runs(ids, num_columns, length):
    """Node k of column i stands behind the first tokens of the columns up to i and the tokens before it in its own."""
    columns = first_columns(ids, num_columns, length)
    tree = TokenTree(ids[-1])
    ends = add_columns(tree, columns, max_nodes=99, max_depth=99)
    assert len(tree) <= num_columns * length
    for place, (end, column) in enumerate(zip(ends, columns, strict=True)):
        assert tree.ids_before(end) == [first for first, *_ in columns[1 : place + 1]] + list(column[1:])
        assert tree.depths[end] == place + length - 1


@given(max_nodes=st.integers(1, 30), max_depth=st.integers(0, 10), **WINDOWS)
def test_a_window_takes_the_room_there_is(max_nodes, max_depth, num_columns, length):
    columns = tuple(tuple(range(100 * i, 100 * i + length)) for i in range(num_columns))
    tree = TokenTree(0)
    ends = add_columns(tree, columns, max_nodes, max_depth)
    assert len(tree) == max(1, len(ends) * length) <= max_nodes
    assert max(tree.depths) <= max_depth
    if len(ends) < num_columns:
        assert (len(ends) + 1) * length > max_nodes or len(ends) + length - 1 > max_depth


@given(following=st.lists(st.integers(0, 9), min_size=10, max_size=10), steps=st.integers(0, 3), **WINDOWS)
def test_columns_become_what_the_model_says(following, steps, num_columns, length):
    """Where a token decides about the next one, all columns are its runs after as many rounds as they have tokens."""
    columns = first_columns([1, 2, 3], num_columns, length)
    for _ in range(length + steps):
        next_ids = [following[column[-1]] for column in columns]
        ngrams = completed_ngrams(columns, 5, next_ids)
        columns = next_columns(columns, next_ids)
    assert [len(ngram) for ngram in ngrams] == [length + 1] * num_columns
    assert ngrams[0][0] == 5
    for ngram in [*columns, *ngrams[1:], ngrams[0][1:]]:
        assert list(ngram[1:]) == [following[token_id] for token_id in ngram[:-1]]
    assert next_columns(columns, [0])[1:] == columns[1:]


@pytest.fixture(scope="module")
def repeating():
    """Each token follows from the one before alone, so its texts run in circles."""
    return shallow(build_base("llama", tie_word_embeddings=False), 0)


@pytest.fixture(scope="module")
def varied():
    """Texts that say much anew and something again."""
    return shallow(build_base("llama", tie_word_embeddings=False, num_hidden_layers=4), 2)


def run(base, prompts, params=FREE, tokenizer=None, **options):
    options = {"num_blocks": 80, "block_size": 4} | options
    engine = Engine(EarlyExitModel.from_configs(base, []), tokenizer, method="lookahead", **options)
    return engine.generate(prompts, params), engine


def test_a_text_that_repeats_itself_takes_few_rounds(repeating):
    completions, engine = run(repeating, PROMPTS)
    assert [each.token_ids for each in completions] == [reference(repeating, prompt, 40) for prompt in PROMPTS]
    assert list(engine.stats.levels) == ["draft", "target"]
    draft, target = engine.stats.levels["draft"], engine.stats.levels["target"]
    assert engine.stats.num_committed == 160 == engine.stats.num_prefills + target.num_accepted + target.num_rounds
    assert target.acceptance_length > 2
    assert target.num_accepted == sum(target.accepted_per_position) > 0
    assert target.num_drafted == sum(target.drafted_per_position)
    assert target.num_drafted <= draft.num_rounds
    # One row for each node: the root, the drafted tokens and those of the window that are none of these.
    num_rows = target.num_layer_passes / 6
    most = target.num_rounds + draft.num_rounds + target.num_rounds * (5 * 3 - 1)
    assert target.num_rounds + draft.num_rounds <= num_rows <= most
    assert draft.num_layer_passes == 0 < draft.seconds
    for completion in completions:
        assert set(completion.origins) == {"draft", "target"}
        counts = completion.stats.levels["target"]
        assert 0 <= counts.num_accepted - completion.origins.count("draft") <= 1


@pytest.mark.parametrize("architecture", ["qwen2-window", "opt", "gemma2"])
def test_greedy_texts_are_those_of_generate(make_base, architecture):
    """Alone and side by side; sliding windows, learned positions, capped scores; blocks of 4 tokens."""
    base = shallow(make_base(architecture), 2)
    expected = [reference(base, prompt, 24) for prompt in PROMPTS]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for options in ({}, {"max_num_seqs": 1, "lookahead_window": 8, "lookahead_ngram": 2, "lookahead_candidates": 1}):
        completions, engine = run(base, PROMPTS, params, **options)
        assert [each.token_ids for each in completions] == expected
        assert engine.stats.levels["target"].num_accepted


def never_moved(self, sequences, paths):
    """Wrong: what a path left stays where its nodes were."""
    for sequence, path in zip(sequences, paths, strict=True):
        sequence.num_computed = [len(sequence.token_ids) - 1 + len(path)]


def sees_all(self):
    """Wrong: nodes see whatever came before them in the tree, siblings too."""
    return torch.ones(len(self), len(self)).tril().bool().numpy()


@pytest.mark.parametrize(
    ("owner", "name", "mutation"), [(ModelRunner, "keep_paths", never_moved), (TokenTree, "ancestors", sees_all)]
)
def test_a_wrong_pass_is_found_out(varied, monkeypatch, owner, name, mutation):
    monkeypatch.setattr(owner, name, mutation)
    completions, _ = run(varied, PROMPTS)
    assert [each.token_ids for each in completions] != [reference(varied, prompt, 40) for prompt in PROMPTS]


def test_paths_that_do_not_lie_in_place_are_met(varied, monkeypatch):
    """And the texts are right: the mutations above are about something."""
    paths, keep = [], ModelRunner.keep_paths

    def watched(self, sequences, kept):
        paths.extend(kept)
        keep(self, sequences, kept)

    monkeypatch.setattr(ModelRunner, "keep_paths", watched)
    completions, _ = run(varied, PROMPTS)
    assert [each.token_ids for each in completions] == [reference(varied, prompt, 40) for prompt in PROMPTS]
    assert sum(path != list(range(len(path))) for path in paths) > 2


def test_a_text_ends_inside_a_branch(repeating):
    """By an end token and by a stop string, which the prompt has said before."""
    tokenizer = build_tokenizer()
    own = reference(repeating, PERIODIC, 40)
    first = min(own.index(token) for token in own[-2:])
    prompt = own[-8:] + PERIODIC[-1:]
    for ending in ({"stop_token_ids": own[first + 1]}, {"stop": tokenizer.decode(own[first + 1])}):
        ending = {name: [value] for name, value in ending.items()}
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, **ending)
        (completion,), _ = run(repeating, [prompt], params, tokenizer)
        assert completion.token_ids == own[: first + 2]
        assert completion.text == tokenizer.decode(own[: first + 2 - ("stop" in ending)]) + " " * ("stop" in ending)
        assert completion.finish_reason == "stop"
        assert completion.origins[-1] == "draft"
        assert completion.stats.levels["target"].num_accepted > completion.origins.count("draft")


def test_the_length_ends_inside_a_branch(repeating):
    """A window that does not fit is smaller, and the text is as long as was asked."""
    own = reference(repeating, PERIODIC, 40)
    for length in range(1, 14):
        (completion,), _ = run(repeating, [PERIODIC], SamplingParams(max_new_tokens=length, ignore_eos=True))
        assert completion.token_ids == own[:length]
        assert completion.finish_reason == "length"


def test_with_no_block_to_spare_it_decodes_plainly(varied):
    """Branches take what is left over: one sequence fills the pool to its last block."""
    expected = reference(varied, PERIODIC, 20)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    passes = []
    for num_blocks in (10, 11, 80):
        (completion,), engine = run(varied, [PERIODIC], params, num_blocks=num_blocks)
        assert completion.token_ids == expected
        assert engine.stats.num_prefills == 1
        passes.append(engine.stats.levels["target"].num_layer_passes)
    assert passes[0] < passes[1] < passes[2]


class Growing:
    """What a scheduler knows of a sequence."""

    def __init__(self, num_tokens, max_length):
        self.token_ids, self.max_length = [0] * num_tokens, max_length
        self.block_table, self.is_read, self.patience, self.num_computed = [], False, 8, [0]

    @property
    def num_unread(self):
        return 0 if self.is_read else len(self.token_ids)


def test_branches_take_no_block_from_anyone():
    manager = BlockManager(8, 4)
    scheduler = Scheduler(manager, 3, 100, 0, max_branched=29)
    first, second = Growing(9, 30), Growing(5, 8)
    scheduler.add(first)
    scheduler.schedule()
    assert len(first.block_table) == 3
    first.is_read = True
    scheduler.add(second)
    scheduler.schedule()
    assert (len(first.block_table), len(second.block_table)) == (6, 2)
    assert second in scheduler.running
    scheduler.trim(first)
    assert len(first.block_table) == 3
    second.is_read = True
    scheduler.schedule()
    assert manager.num_free == 0
    assert scheduler.running == [first, second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_mode_has_the_bits_of_plain_decoding(varied, dtype):
    base = copy.deepcopy(varied).to(dtype)
    model = EarlyExitModel.from_configs(base, [])
    params = [
        SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=1, temperature=temperature, seed=3)
        for temperature in (0, 1.0, 0, 0.7)
    ]
    texts = []
    for method in ("autoregressive", "lookahead"):
        engine = Engine(model, method=method, exact=True, num_blocks=80, block_size=4)
        completions = engine.generate(PROMPTS, params)
        texts.append([(each.token_ids, [logprob.logprob for logprob in each.logprobs]) for each in completions])
    assert texts[0] == texts[1]
    assert engine.stats.levels["target"].num_accepted


def test_sampled_texts_are_distributed_as_the_base_says(sampled_model):
    """What is drawn; coupled texts are those of plain decoding, token for token."""
    counts, engine = sample(
        sampled_model, SAMPLINGS["filtered"], seeded=False, method="lookahead", num_samples=1500, **SMALL
    )
    assert is_lossless(sampled_model, counts, SAMPLINGS["filtered"]), deviations(
        sampled_model, counts, SAMPLINGS["filtered"]
    )
    target = engine.stats.levels["target"]
    assert 0.05 < target.acceptance_rate < 0.95


def greedy_branch(self, choices, is_usable):
    """Wrong: the first branch is kept whatever is chosen."""
    path = [0]
    while (following := next((n for n in range(len(choices)) if self.parents[n] == path[-1]), None)) is not None:
        path.append(following)
    return path


def test_a_wrong_rule_is_found_out(sampled_model, monkeypatch):
    monkeypatch.setattr(TokenTree, "chosen_path", greedy_branch)
    counts, _ = sample(sampled_model, SAMPLINGS["filtered"], seeded=False, method="lookahead", num_samples=900, **SMALL)
    assert not is_lossless(sampled_model, counts, SAMPLINGS["filtered"])


def test_a_seed_gives_the_text_of_plain_decoding(varied):
    params = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.0, seed=seed, **extra)
        for seed, extra in enumerate(({}, {"top_k": 5}, {"repetition_penalty": 1.3}, {"logit_bias": {9: 2.0}}))
    ]
    plain = Engine(EarlyExitModel.from_configs(varied, []), method="autoregressive", num_blocks=80)
    expected = [each.token_ids for each in plain.generate(PROMPTS, params)]
    for options in ({}, {"max_num_seqs": 2}, {"num_blocks": 18}, SMALL):
        completions, _ = run(varied, PROMPTS, params, **options)
        assert [each.token_ids for each in completions] == expected


def test_penalties_see_the_branch(repeating, monkeypatch):
    """A token that is said until it has been said too often; that may be inside a branch."""
    params = [
        SamplingParams(max_new_tokens=40, ignore_eos=True, frequency_penalty=penalty)
        for penalty in (0.1, 0.13, 0.17, 0.2, 0.3)
    ]
    prompts = [reference(repeating, PERIODIC, 40)] * 5
    plain = Engine(EarlyExitModel.from_configs(repeating, []), method="autoregressive", num_blocks=80)
    expected = [each.token_ids for each in plain.generate(prompts, params)]
    completions, engine = run(repeating, prompts, params)
    assert [each.token_ids for each in completions] == expected
    assert engine.stats.levels["target"].num_accepted > 10
    # Wrong: as if each node stood behind the root.
    monkeypatch.setattr(TokenTree, "ids_before", lambda self, node: [])
    completions, _ = run(repeating, prompts, params)
    assert [each.token_ids for each in completions] != expected


def test_logprobs_are_those_of_the_model(varied):
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=3)
    completions, engine = run(varied, PROMPTS, params)
    assert engine.stats.levels["target"].num_accepted
    plain = Engine(EarlyExitModel.from_configs(varied, []), method="autoregressive", num_blocks=80)
    for completion, wanted in zip(completions, plain.generate(PROMPTS, params), strict=True):
        found, expected = (
            torch.tensor([[each.logprob, *each.top.values()] for each in one.logprobs]) for one in (completion, wanted)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_guesses_that_the_base_cannot_compute_change_nothing(varied, monkeypatch):
    """In the window, in the pool, or in both: 0 times NaN is NaN, and yet no text is lost."""
    expected = [reference(varied, prompt, 16) for prompt in PROMPTS]
    said = {token for tokens in [*expected, *PROMPTS] for token in tokens}
    culprit = next(token for token in range(3, 64) if token not in said)
    spoiled = copy.deepcopy(varied)
    with torch.no_grad():
        spoiled.get_input_embeddings().weight[culprit] = torch.nan
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    drafts, draft = [], Lookahead._draft

    def poisoned(self, sequence, max_nodes):
        made = draft(self, sequence, max_nodes)
        # Now and then, so that rounds before and behind are whole.
        if len(sequence.token_ids) % 3 == 0 and sequence.jacobi_columns:
            sequence.ngram_pool.add((sequence.token_ids[-1], culprit, culprit))
            made = draft(self, sequence, max_nodes)
        drafts.append(culprit in made.tree.token_ids)
        return made

    monkeypatch.setattr(Lookahead, "_draft", poisoned)
    for columns in (None, ((culprit,) * 3,) * 5):
        if columns:
            monkeypatch.setattr(lookahead_module, "first_columns", lambda *arguments, columns=columns: columns)
        completions, _ = run(spoiled, PROMPTS, params)
        assert [each.error for each in completions] == [None] * 4
        assert [each.token_ids for each in completions] == expected
        assert any(drafts)
        drafts.clear()


def test_a_request_that_fails_fails_alone(varied):
    """Where the model itself cannot go on the text ends with the tokens before it."""
    expected = [reference(varied, prompt, 16) for prompt in PROMPTS]
    others = {token for tokens in [*expected[1:], *PROMPTS] for token in tokens}
    place, culprit = next((i, t) for i, t in enumerate(expected[0]) if t not in others and t not in expected[0][:i])
    spoiled = copy.deepcopy(varied)
    with torch.no_grad():
        spoiled.get_input_embeddings().weight[culprit] = torch.inf
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    completions, _ = run(spoiled, PROMPTS, params)
    assert completions[0].token_ids == expected[0][: place + 1]
    assert completions[0].finish_reason == "error"
    assert f"at position {len(PROMPTS[0]) + place + 1} " in completions[0].error
    assert [each.token_ids for each in completions[1:]] == expected[1:]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lookahead_window": 0}, "lookahead_window is 0; it must be at least 1"),
        ({"lookahead_ngram": 1}, "lookahead_ngram is 1; it must be at least 2"),
        ({"lookahead_candidates": 0}, "lookahead_candidates is 0"),
        ({"method": "lookahead", "cuda_graphs": True}, "method 'lookahead' attends by masks"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


def test_it_needs_no_heads_and_minds_none(varied):
    model = build_heads(varied, "random", (1, 2), committed_context=True)
    engine = Engine(model, method="lookahead", num_blocks=80)
    completions = engine.generate(PROMPTS, FREE)
    assert [each.token_ids for each in completions] == [reference(varied, prompt, 40) for prompt in PROMPTS]
