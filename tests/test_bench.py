"""`hispec-bench`: what it measures, keeps and prints, and what it says to bad input."""

import json
import types
import typing
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from hispec.checkpoints import save_adapter, save_verifier
from hispec.heads import DraftVerifier
from hispec.infer import bench, demo, prompt_sets
from hispec.infer.bench import main
from hispec.infer.bench_file import round_key
from hispec.infer.bench_schema import Result
from hispec.infer.bench_summary import ALL
from hispec.infer.benchmark import Benchmark
from hispec.infer.methods import METHODS
from hispec.infer.way import WaySettings

from .models import build_heads, shallow
from .train_support import build_tokenizer, write_prompts

NUM_PROMPTS = {"long": 3, "short": 2}


@pytest.fixture(scope="module")
def places(base, tmp_path_factory):
    """Flags for a base with heads that are always right, and the folder where they lie with two files of prompts."""
    folder = tmp_path_factory.mktemp("bench")
    base = shallow(base, 2)
    base.save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    save_adapter(build_heads(base, "good", committed_context=True), folder / "adapter")
    for name, number in NUM_PROMPTS.items():
        write_prompts(folder / f"{name}.jsonl", number)
    flags = ["--model", str(folder / "base"), "--adapter", str(folder / "adapter"), "--dtype", "float32"]
    return folder, [*flags, "--max-new-tokens", "8", "--repeats", "1"]


@pytest.fixture(scope="module")
def finished(places):
    """The output of one whole benchmark."""
    folder, flags = places
    output = folder / "finished"
    prompts = [part for name in NUM_PROMPTS for part in ("--prompts", str(folder / f"{name}.jsonl"))]
    methods = "autoregressive,single-layer,hispec,prompt-lookup"
    command = [*flags, *prompts, "--batch-size", "1,2", "--temperature", "0,0.7", "--methods", methods]
    assert main([*command, "--max-new-tokens", "6", "--output", str(output)]) == 0
    return output


def run(places, output, *more, prompts="short"):
    folder, flags = places
    return main([*flags, "--prompts", str(folder / f"{prompts}.jsonl"), "--output", str(output), *more])


def result_of(output):
    return json.loads((output / "benchmark.json").read_text())


def lines_of(output):
    return [json.loads(line) for line in (output / "measurements.jsonl").read_text().splitlines()]


def check_type(value, wanted, where):
    """Raise AssertionError where `value` is not what the schema says."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if typing.is_typeddict(wanted):
        assert value.keys() == wanted.__annotations__.keys(), where
        for name, kind in wanted.__annotations__.items():
            check_type(value[name], kind, f"{where}.{name}")
    elif origin is types.UnionType:
        kinds = [kind for kind in arguments if kind is not types.NoneType]
        if value is not None or len(kinds) == len(arguments):
            check_type(value, kinds[0], where)
    elif origin in (list, dict):
        assert isinstance(value, origin), where
        for key, item in value.items() if origin is dict else enumerate(value):
            check_type(item, arguments[-1], f"{where}[{key}]")
    elif wanted is float:
        assert isinstance(value, int | float), where
    elif wanted is not typing.Any:
        assert type(value) is wanted, where


def test_the_result_is_what_the_schema_says_and_adds_up(finished):
    result = result_of(finished)
    check_type(result, Result, "result")
    assert result["is_complete"]
    assert result["is_lossless"]
    records = [line for line in lines_of(finished) if "method" in line]
    cells = {(c["set"], c["temperature"], c["batch_size"], c["method"]): c for c in result["cells"]}
    assert len(cells) == len(result["cells"]) == 3 * 2 * 2 * 5
    for (name, temperature, batch_size, method), cell in cells.items():
        mine = [
            record
            for record in records
            if (record["temperature"], record["batch_size"], record["method"]) == (temperature, batch_size, method)
            and name in (ALL, record["set"])
        ]
        if method == "prompt-lookup" and batch_size == 2:
            assert cell["refused"] == "ValueError: assisted generate is only supported for batch_size = 1"
            assert (cell["num_calls"], cell["ratio"], cell["check"]) == (0, None, None)
            continue
        num_batches = sum(-(-number // batch_size) for key, number in NUM_PROMPTS.items() if name in (ALL, key))
        assert cell["num_calls"] == len(mine) == num_batches
        assert cell["num_new_tokens"] == sum(len(ids) for record in mine for ids in record["token_ids"])
        if temperature == 0 or METHODS[method].promise == "lossless":
            assert cell["check"]["num_equal"] == cell["check"]["num_texts"] == num_batches * batch_size
            assert cell["check"]["share_agreeing"] == 1
        else:
            assert cell["check"] is None
        if method == "generate":
            assert cell["ratio"]["mean"] == 1
        if METHODS[method].num_heads:
            target = cell["levels"]["target"]
            assert target["acceptance_rate"] == 1  # the heads are always right
            assert set(target["accepted_per_position"]) == {1.0}
            assert cell["time_shares"].keys() == {"prefill", "other", *cell["levels"]}
            assert sum(cell["time_shares"].values()) == pytest.approx(1)
            assert min(cell["time_shares"].values()) > -1e-3
            assert cell["verification_to_draft_time"].keys() == cell["levels"].keys() - {"draft"}
            assert cell["wasted_layers_per_token"] == pytest.approx(cell["layers_per_token"] - 6)
        if method == "autoregressive":
            assert cell["wasted_layers_per_token"] == 0


def test_report_and_figures(finished):
    report = (finished / "report.md").read_text()
    assert "token-identical to the model's own." in report
    assert "- prompt-lookup: ValueError: assisted generate is only supported" in report
    assert str(finished.parent) not in report + (finished / "benchmark.json").read_text()
    figures = {path.stem: ElementTree.fromstring(path.read_text()) for path in (finished / "figures").iterdir()}
    assert figures.keys() == {"speedup", "batch", "stages", "positions"}
    for name, figure in figures.items():
        assert figure.tag == "{http://www.w3.org/2000/svg}svg"
        assert f"](figures/{name}.svg)" in report
    assert "hispec, target" in "".join(figures["positions"].itertext())


def test_json_is_one_object_and_nothing_else(places, tmp_path, capfd):
    assert run(places, tmp_path / "out", "--methods", "single-layer", "--json") == 0
    printed = capfd.readouterr()
    check_type(json.loads(printed.out), Result, "result")
    assert printed.out.count("\n") == 1
    assert not (tmp_path / "out" / "figures" / "batch.svg").exists()


def test_an_interrupted_run_goes_on_and_a_finished_one_starts_anew(places, tmp_path, monkeypatch, capfd):
    output = tmp_path / "out"
    measure, measured = Benchmark.measure, []

    def until_interrupted(self, this, number):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(this)
        return measure(self, this, number)

    monkeypatch.setattr(Benchmark, "measure", until_interrupted)
    assert run(places, output, "--methods", "single-layer", prompts="long") == 130
    assert f"interrupted; the same command goes on from {output}" in capfd.readouterr().err
    assert not (output / "report.md").exists()
    start, *kept = lines_of(output)
    assert [record["method"] for record in kept] == ["generate", "single-layer"] * 2
    # A machine that goes down leaves half of a round, and half of a line.
    with (output / "measurements.jsonl").open("a") as file:
        file.write(json.dumps(kept[0] | {"group": 2}) + '\n{"set": "lo')
    monkeypatch.setattr(Benchmark, "measure", lambda *arguments: measured.append(arguments[1]) or measure(*arguments))
    assert run(places, output, "--methods", "single-layer", prompts="long") == 0
    assert "2 of 3 rounds are there already" in capfd.readouterr().err
    assert [each.group for each in measured] == [0, 1, 2]
    assert lines_of(output)[:5] == [start, *kept]
    assert len({round_key(record) for record in lines_of(output)[1:-1]}) == 3
    assert run(places, output, "--methods", "single-layer", prompts="long") == 0
    assert len(measured) == 6
    before = (output / "measurements.jsonl").read_bytes()
    assert run(places, output, "--methods", "single-layer", "--max-new-tokens", "9", prompts="long") == 2
    assert "holds another benchmark (max_new_tokens was 8, now 9); choose another --output" in capfd.readouterr().err
    assert (output / "measurements.jsonl").read_bytes() == before


def test_figures_of_other_heads_are_another_benchmark(places, base, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["--methods", "single-layer", "--adapter", "heads"]
    for head, code in (("norm", 0), ("mlp", 2)):
        save_adapter(build_heads(shallow(base, 2), "random", head=head), tmp_path / "heads")
        assert run(places, tmp_path / "out", *command) == code
    error = capfd.readouterr().err
    assert "holds another benchmark (heads was " in error
    assert "choose another --output" in error


def test_quick_ends_in_time_with_what_it_has(places, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK_SECONDS", 0)
    assert run(places, tmp_path / "out", "--methods", "single-layer", "--quick") == 0
    result = result_of(tmp_path / "out")
    assert not result["is_complete"]
    assert [cell["num_calls"] for cell in result["cells"]] == [1, 1]
    assert "The time limit came before the last round" in (tmp_path / "out" / "report.md").read_text()


def with_wrong_token(name):
    """A method that says one token that the model would not."""

    def build(model, settings):
        way = METHODS_AS_THEY_ARE[name].build(model, settings)

        def answer(prompts, params):
            answers = way(prompts, params)
            wrong = [[*ids[:-1], (ids[-1] + 7) % 60 + 3] for ids in answers.token_ids]
            return replace(answers, token_ids=wrong)

        return answer

    return build


METHODS_AS_THEY_ARE = dict(METHODS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_another_text_is_loud_and_exit_code_1(places, tmp_path, monkeypatch, capfd, dtype, temperature):
    wrong = replace(METHODS["single-layer"], build=with_wrong_token("single-layer"))
    monkeypatch.setitem(METHODS, "single-layer", wrong)
    command = ["--methods", "single-layer", "--dtype", dtype, "--temperature", temperature]
    assert run(places, tmp_path / "out", *command) == 1
    assert "NOT LOSSLESS: single-layer on short, batch 1" in capfd.readouterr().err.strip().splitlines()[-1]
    assert not result_of(tmp_path / "out")["is_lossless"]
    assert "NOT LOSSLESS: single-layer" in (tmp_path / "out" / "report.md").read_text()


def test_a_lossy_method_is_counted_and_no_failure(places, tmp_path, monkeypatch):
    lossy = replace(METHODS["single-layer"], build=with_wrong_token("single-layer"), promise="lossy")
    monkeypatch.setitem(METHODS, "single-layer", lossy)
    assert run(places, tmp_path / "out", "--methods", "single-layer") == 0
    cell = result_of(tmp_path / "out")["cells"][1]
    assert (cell["check"]["num_equal"], cell["check"]["is_lossless"]) == (0, False)
    assert 0.5 < cell["check"]["share_agreeing"] < 1


def test_sprinter_has_its_agreement_beside_its_speed(places, base, tmp_path, capfd):
    """With a verifier that trusts heads which are wrong: no failure, but told; sampling it refuses; never unasked."""
    folder, flags = places
    heads = tmp_path / "heads"
    save_adapter(build_heads(shallow(base, 2), "random", (2,), head="mlp"), heads)
    flags = [*flags[:3], str(heads), *flags[4:], "--prompts", str(folder / "short.jsonl")]
    flags += ["--output", str(tmp_path / "out")]
    assert main([*flags, "--methods", "sprinter"]) == 2
    assert "has no verifier, which method 'sprinter' needs; fit one:" in capfd.readouterr().err
    trusting = DraftVerifier(exit_layer=2, weight=torch.zeros(35), bias=torch.tensor(9.0))
    save_verifier(trusting, heads, measured={}, run={})
    assert main([*flags, "--methods", "single-layer,sprinter", "--temperature", "0,0.7"]) == 0
    result = result_of(tmp_path / "out")
    check_type(result, Result, "result")
    assert result["is_lossless"]
    assert result["methods"]["sprinter"]["promise"] == "lossy"
    _, exact, lossy, _, _, refused = result["cells"]
    assert (exact["check"]["share_chosen"], exact["skipped_share"]) == (1, 0)
    assert lossy["skipped_share"] == pytest.approx(6 / 7)
    records = [line for line in lines_of(tmp_path / "out") if line.get("method") == "sprinter" and not line["error"]]
    rows = []
    for record in records:
        prompt = prompt_ids_of(folder, record["prompt_ids"][0])
        logits = shallow(base, 2)(input_ids=torch.tensor([[*prompt, *record["token_ids"][0]]])).logits[0]
        rows += (logits[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(record["token_ids"][0])).tolist()
    assert lossy["check"]["share_chosen"] == pytest.approx(sum(rows) / len(rows))
    assert 0 < lossy["check"]["share_chosen"] < 0.9
    assert refused["refused"].startswith("ValueError: temperature is 0.7, but method 'sprinter' decodes greedily alone")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "**Lossy: sprinter.** Texts are not the model's own" in report
    assert f"| {lossy['check']['num_equal']} of 2, LOSSY | {lossy['check']['share_chosen']:.1%} |" in report
    assert "- sprinter: of 86% of the tokens the model was never asked." in report
    assert "sprinter" not in bench.choose_methods(None, 2)


def prompt_ids_of(folder, name):
    lines = (folder / "short.jsonl").read_text().splitlines()
    text = next(line["prompt"] for line in map(json.loads, lines) if line["id"] == name)
    return build_tokenizer()(text)["input_ids"]


def test_a_peer_that_fails_later_is_told(places, tmp_path, monkeypatch, capfd):
    def build(model, settings):
        calls = []

        def answer(prompts, params):
            calls.append(prompts)
            if len(calls) == 3:
                raise IndexError("out of range")
            return METHODS_AS_THEY_ARE["generate"].build(model, settings)(prompts, params)

        return answer

    monkeypatch.setitem(METHODS, "prompt-lookup", replace(METHODS["prompt-lookup"], build=build))
    assert run(places, tmp_path / "out", "--methods", "prompt-lookup") == 0
    assert "prompt-lookup refused: IndexError: out of range" in capfd.readouterr().out
    assert result_of(tmp_path / "out")["cells"][1]["num_calls"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--methods", "hispac"], "method 'hispac' is unknown; choose of generate, "),
        (["--prompts", "/nowhere/p.jsonl"], "'/nowhere/p.jsonl' are no file here and no known set; known: sharegpt, "),
        (["--max-new-tokens", "255"], "the set short has no prompt of at most 1 tokens"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--batch-size", "0"], "is 0; each must be at least 1"),
        (["--batch-size", "2,2"], "batch_sizes are [2, 2]"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--limit", "0"], "--limit is 0"),
        (["--num-draft-tokens", "0"], "num_draft_tokens is 0"),
        (["--model", "nonsense"], "the model 'nonsense' is unknown"),
        (["--dtype", "int8"], "'int8'"),
        (["--output", "/dev/null"], "the output /dev/null cannot be written"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(places, tmp_path, capfd, change, message):
    assert run(places, tmp_path / "out", *change) == 2
    printed = capfd.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("hispec-bench: error: ")
    assert message in last
    assert printed.out == ""


def test_no_prompts_and_none_in_a_file(places, tmp_path, capfd):
    _, flags = places
    assert main(flags) == 2
    assert "there are no prompts; give --prompts FILE" in capfd.readouterr().err
    (tmp_path / "none.jsonl").write_text("\n")
    assert main([*flags, "--prompts", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")]) == 2
    assert "has no usable prompt" in capfd.readouterr().err


def test_a_method_that_the_model_cannot_run(places, tmp_path, capfd):
    folder, flags = places
    without_heads = [*flags[:2], *flags[4:], "--prompts", str(folder / "short.jsonl"), "--output"]
    assert main([*without_heads, str(tmp_path / "out"), "--methods", "hispec"]) == 2
    assert "method 'hispec' needs 2 exit heads, but the model has 0" in capfd.readouterr().err
    # Unless named, it is left out.
    assert bench.choose_methods(None, 0)[:5] == ["generate", "autoregressive", "ngram", "lookahead", "prompt-lookup"]


def test_a_set_that_cannot_be_reached(places, tmp_path, monkeypatch, capfd):
    def unreachable(*arguments, **options):
        raise LocalEntryNotFoundError("no route")

    monkeypatch.setattr(prompt_sets, "snapshot_download", unreachable)
    assert run(places, tmp_path / "out", "--prompts", "xsum") == 2
    message = "the set xsum cannot be read from EdinburghNLP/xsum on the hub (which cannot be reached); connect, or"
    assert message in capfd.readouterr().err


def test_every_second_round_runs_backwards_and_the_last_batch_is_filled(base, monkeypatch):
    calls = []

    def build(name):
        def build_way(model, settings):
            way = METHODS_AS_THEY_ARE["generate"].build(model, settings)
            return lambda prompts, params: calls.append((name, len(prompts))) or way(prompts, params)

        return build_way

    names = ("generate", "autoregressive", "single-layer")
    for name in names:
        monkeypatch.setitem(METHODS, name, replace(METHODS[name], build=build(name)))
    prompts = prompt_sets.PromptSet(name="a", ids=["x", "y", "z"], token_ids=[[5], [6, 7], [8]])
    options = bench.BenchOptions(methods=names, batch_sizes=(2,), max_new_tokens=3)
    benchmark = Benchmark(build_heads(base, "good"), [prompts], options, WaySettings(max_num_seqs=2, max_length=9))
    rounds = benchmark.rounds()
    records = [benchmark.measure(each, number) for number, each in enumerate(rounds)]
    timed = [name for name, size in calls if size == 2]
    assert timed == [*names, *reversed(names)]
    assert [record["method"] for record in records[1]] == list(names)
    assert [record[0]["prompt_ids"] for record in records] == [["x", "y"], ["z", "x"]]


@pytest.mark.parametrize(("dtype", "is_lossless"), [("float32", False), ("bfloat16", True)])
def test_a_near_tie_counts_in_16_bits_alone(make_base, monkeypatch, dtype, is_lossless):
    wrong = replace(METHODS["single-layer"], build=with_wrong_token("single-layer"))
    monkeypatch.setitem(METHODS, "single-layer", wrong)
    base = make_base("llama").to(getattr(torch, dtype))
    prompts = prompt_sets.PromptSet(name="a", ids=["x"], token_ids=[[5, 6]])
    options = bench.BenchOptions(methods=("generate", "single-layer"), max_new_tokens=3)
    benchmark = Benchmark(build_heads(base, "good"), [prompts], options, WaySettings(max_length=9))
    assert 0 < benchmark.max_gap < (1 if dtype == "bfloat16" else 1e-4)
    benchmark.max_gap = float("inf")
    _, record = benchmark.measure(benchmark.rounds()[0], 0)
    assert record["check"]["num_equal"] == 0
    assert record["check"]["is_lossless"] == is_lossless


def test_the_demo_shows_texts_and_the_table(places, monkeypatch, capsys):
    _, flags = places
    monkeypatch.setattr(demo, "PROMPTS", ("w3 w4", "w5 w6 w7"))
    assert demo.main([*flags[:6], "--max-new-tokens", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("target keeps 100%") == 4
    assert printed.count("autoregressive ") == 3
    assert "ngram" not in printed
    assert "demo, greedy, batch 1: medians of 2 calls" in printed


def test_a_draft_level_that_was_never_sure_has_no_ratio(places, tmp_path):
    """Under adadecode exits are asked, and may all be unsure."""
    assert run(places, tmp_path / "out", "--methods", "adadecode", "--max-new-tokens", "4") == 0
    cells = {cell["method"]: cell for cell in result_of(tmp_path / "out")["cells"]}
    draft = cells["adadecode"]["levels"]["draft"]
    assert draft["num_rounds"] or cells["adadecode"]["verification_to_draft_time"] is None


def test_drafts_by_ngrams_are_a_part_of_their_own(places, tmp_path):
    assert run(places, tmp_path / "out", "--methods", "single-layer+ngram", "--max-new-tokens", "6") == 0
    result = result_of(tmp_path / "out")
    cell = next(cell for cell in result["cells"] if cell["method"] == "single-layer+ngram")
    assert list(cell["levels"]) == ["ngram", "draft", "target"]
    assert "ngram" not in (cell["verification_to_draft_time"] or {})
    assert result["is_lossless"]
    assert "ngram" in (tmp_path / "out" / "figures" / "stages.svg").read_text()
