"""Transformers' own ways to answer, the sets of prompts, and memory."""

import pytest
import torch

from hispec.infer import SamplingParams
from hispec.infer.bench_summary import spread, summarise
from hispec.infer.benchmark import Benchmark, BenchOptions
from hispec.infer.config import EngineConfig
from hispec.infer.footprint import PeakMemory, level_bytes
from hispec.infer.methods import METHODS
from hispec.infer.peers import cut_at_end
from hispec.infer.prompt_sets import HUB_SETS, PromptSet, read_prompt_set
from hispec.infer.way import WaySettings

from .models import build_heads, reference

PROMPTS = [[3, 4, 5], [9], list(range(5, 17))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "generate-batch" else [])
        for name in METHODS
        if METHODS[name].by_default
    ],
)
def test_each_way_says_the_models_own_text_and_when(base, name):
    model = build_heads(base, "random")
    way = METHODS[name].build(model, WaySettings(max_num_seqs=3, max_length=40))
    expected = [reference(base, prompt, 14, eos_token_id=2) for prompt in PROMPTS]
    one_by_one = name in ("prompt-lookup", "assistant-early-exit")
    for batch in [[prompt] for prompt in PROMPTS] if one_by_one else [PROMPTS]:
        answers = way(batch, SamplingParams(max_new_tokens=14))
        assert answers.token_ids == [expected[PROMPTS.index(prompt)] for prompt in batch]
        assert len(answers.first_seconds) == len(batch)
        assert all(0 < first < answers.seconds for first in answers.first_seconds)
    if METHODS[name].promise == "lossless":
        assert answers.stats.num_committed == sum(map(len, expected))


def test_sampled_peers_have_the_seed(base):
    way = METHODS["generate"].build(build_heads(base, "good"), WaySettings(max_length=40))
    params = [SamplingParams(max_new_tokens=12, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    one, same, other = (way([PROMPTS[0]], each).token_ids for each in params)
    assert one == same != other


def test_a_row_ends_with_its_end_token():
    assert cut_at_end([5, 2, 0, 0], frozenset([2])) == [5, 2]
    assert cut_at_end([5, 6], frozenset([2])) == [5, 6]
    assert cut_at_end([], frozenset([2])) == []


def test_what_an_architecture_has_not_is_told(make_base):
    base = make_base("gpt2")
    expected = reference(base, [5, 6], 4, eos_token_id=2)
    prompts = PromptSet(name="a", ids=["x"], token_ids=[[5, 6]])
    options = BenchOptions(methods=("generate", "assistant-early-exit"), max_new_tokens=4)
    benchmark = Benchmark(build_heads(base, "good"), [prompts], options, WaySettings(max_length=9))
    benchmark.warm_up()
    (this,) = benchmark.rounds()
    plain, refused = benchmark.measure(this, 0)
    assert plain["error"] is None
    assert refused["error"].startswith("IndexError: ")
    # What it leaves behind where it fails is mended: `generate` still has all layers.
    assert plain["token_ids"] == [expected]


ROWS = {
    "sharegpt": [
        {"conversations": [{"from": "gpt", "value": "w9"}]},
        {"conversations": [{"from": "human", "value": "w3"}]},
    ],
    "cnn_dm": [{"article": "w3 " * 99}, {"article": "w3"}],
    "humaneval": [{"prompt": "w3 w4"}],
    "gsm8k": [{"question": "w3"}, {"question": "w4"}, {"question": "w5"}],
    "xsum": [{"document": "w3"}],
}


@pytest.mark.parametrize("name", HUB_SETS)
def test_sets_of_the_hub(name, monkeypatch):
    import datasets

    asked = {}

    def load_dataset(repo, config, **options):
        asked.update(options, repo=repo, config=config)
        return iter(ROWS[name])

    monkeypatch.setattr("hispec.infer.prompt_sets.snapshot_download", lambda *arguments, **options: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = read_prompt_set(name, lambda text: [len(word) for word in text.split()], limit=2, max_length=20)
    assert asked["repo"] == HUB_SETS[name].repo
    assert asked["streaming"]
    assert prompts.name == name
    assert len(prompts.ids) == len(prompts.token_ids) == (2 if name == "gsm8k" else 1)
    assert prompts.num_skipped == (1 if name == "cnn_dm" else 0)


def record(method, group, seconds, num_tokens=10, error=None, name="a", repeat=0):
    place = {"set": name, "temperature": 0.0, "batch_size": 1, "repeat": repeat, "group": group, "method": method}
    if error is not None:
        return place | {"error": error}
    answer = {"token_ids": [[1] * num_tokens], "seconds": seconds, "first_seconds": [seconds / 10]}
    return place | answer | {"error": None, "peak_bytes": None, "stats": None, "check": None}


def test_ratios_are_taken_prompt_by_prompt():
    # The slow prompt is slow for both: the ratio of medians would be 4 / 4 = 1.
    seconds = {0: (1.0, 0.5), 1: (4.0, 2.0), 2: (9.0, 4.0)}
    records = [
        record(method, group, pair[place])
        for group, pair in seconds.items()
        for place, method in enumerate(("generate", "hispec"))
    ]
    plain, ours = summarise(records, 6)
    assert plain["ratio"] == {"mean": 1, "q1": 1, "q3": 1, "num_values": 3}
    assert ours["ratio"] == {"mean": pytest.approx(9 ** (1 / 3)), "q1": 2, "q3": 2.125, "num_values": 3}
    assert ours["ratio_to_autoregressive"] is None
    assert ours["seconds_per_token"]["median"] == pytest.approx(2.0 * 0.9 / 9)
    assert summarise(records[::-1], 6)[::-1] == [plain, ours]


def test_ratios_are_taken_within_a_round_and_multiplied():
    # The machine is ten times slower in the second round, for both.
    records = []
    for repeat, (slower, faster) in enumerate(((1.0, 2.0), (10.0, 8.0))):
        records.append(record("generate", 0, slower, repeat=repeat))
        records.append(record("hispec", 0, slower / faster, repeat=repeat))
    _, ours = summarise(records, 6)
    assert (ours["num_calls"], ours["ratio"]["num_values"]) == (2, 2)
    assert ours["ratio"]["mean"] == pytest.approx(4.0)


def test_a_failed_call_is_in_no_ratio():
    records = [record("generate", 0, 1.0), record("prompt-lookup", 0, 0.5), record("generate", 1, 1.0)]
    records.append(record("prompt-lookup", 1, 0, error="no"))
    _, peer = summarise(records, 6)
    assert (peer["num_calls"], peer["ratio"]["num_values"], peer["refused"]) == (1, 1, "no")


def test_a_spread_of_few():
    assert spread([]) is None
    assert spread([3.0]) == {"median": 3, "q1": 3, "q3": 3, "num_values": 1}


def test_bytes_of_levels_are_those_of_their_tensors(base):
    model = build_heads(base, "good", head="block", draft_vocab_size=16, committed_context=True)
    config = EngineConfig(num_draft_tokens=2, num_provisional_tokens=4, max_num_seqs=3)
    added = level_bytes(model, config, num_tokens=100)
    assert added.keys() == {"draft", "intermediate"}
    head = model.exit_heads[1]
    tensors = [*head.parameters(), base.lm_head.weight[head.draft_vocab_ids]]
    assert added["intermediate"] == {
        "weights": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "kv_cache": 2 * 100 * 2 * 8 * 4,  # keys and values, tokens, heads, their size, bytes of a float
        "hidden_states": 3 * (2 + 4 + 3) * 32 * 4,
    }
    assert level_bytes(model, EngineConfig(method="autoregressive"), 100) == {}


def test_peak_memory_sees_what_is_gone_again():
    memory = PeakMemory(torch.device("cpu"))
    if memory.kind is None:
        pytest.skip("this system does not tell")
    memory.reset()
    before = memory.read()
    block = torch.ones(16 * 2**20)
    del block
    assert memory.read() > before + 50e6
    memory.reset()
    assert memory.read() < before + 50e6
