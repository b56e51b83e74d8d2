"""Plans: what is read of an adapter, what an engine makes of it, and the command."""

import json
import re
import shutil
import statistics

import pytest
import torch

from hispec.checkpoints import load_adapter, save_adapter, shipped_adapter
from hispec.infer import Engine, SamplingParams, auto_plan, bench, machine
from hispec.infer import engine as engine_module
from hispec.infer import plan_command as command
from hispec.infer.acceptance_file import known_acceptance, read_acceptance, write_acceptance
from hispec.infer.acceptance_probe import measure_acceptance
from hispec.infer.cost_model import Acceptance, Overhead, Setting
from hispec.infer.planner import describe, measured_acceptance
from hispec.infer.rate_probe import RateProbe
from hispec.infer.replay import acceptance_to_list
from hispec.infer.what_if import DEVICES, SHAPES, Device, Head, acceptance_on_paper, costs_on_paper, parse_device

from .models import build_heads, reference, shallow
from .test_machine import costs
from .train_support import build_tokenizer

PROMPTS = [[5, 6, 7], [9, 8], [11]]


def places(*shares):
    return {"agreement": list(shares), "num_drafts": [1000] * len(shares)}


REPORT = {
    "hops": {name: {"agreement": 0.5, "acceptance": 0.4} for name in ("2->4", "2->target", "4->target")},
    "by_place": {"2->4": places(0.9, 0.8), "2->target": places(0.7), "4->target": places(0.8, 0.9)},
}


@pytest.fixture
def cheap(monkeypatch, tmp_path):
    """A machine on which nothing but layers costs anything, and how often it was measured."""
    calls = []

    def measure(model, *arguments, **options):
        calls.append(options["max_batch"])
        found = costs()
        tables = dict.fromkeys(model.exit_layers, found.exit_heads[2])
        return type(found)(
            num_layers=model.backbone.num_layers,
            layer=found.layer,
            target_head=found.target_head,
            exit_heads=tables,
            per_round=Overhead(fixed=5.0),
        )

    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto_plan, "measure_costs", measure)
    return calls


@pytest.fixture
def adapter(base, tmp_path):
    base = shallow(base, 2)
    folder = tmp_path / "adapter"
    save_adapter(build_heads(base, "good", (2, 4)), folder, run={"acceptance": REPORT})
    return base, folder


def test_the_shipped_adapter_tells_what_plans_need():
    report = json.loads((shipped_adapter("smollm2") / "run.json").read_text())["acceptance"]
    found = measured_acceptance(report, (2, 8), 30)
    assert set(found.hops) == {(2, 8), (2, 30), (8, 30)}
    assert all(0 < share < 1 for shares in found.hops.values() for share in shares)
    sampled = measured_acceptance(report, (2, 8), 30, greedy=False)
    assert sampled.hops[8, 30][0] < found.hops[8, 30][0]


def test_places_that_few_drafts_reached_do_not_count():
    report = {"by_place": {"2->target": {"agreement": [0.5, 0.9], "num_drafts": [300, 3]}}}
    assert measured_acceptance(report, (2,), 6).hops == {(2, 6): (0.5,)}
    assert measured_acceptance(None, (), 6).hops == {}


@pytest.mark.parametrize(
    "report",
    [
        None,
        {},
        {"by_place": None},
        {"by_place": {"2->target": {"agreement": ["x"], "num_drafts": [100]}}},
        {"by_place": {"2->target": {"agreement": [1.5], "num_drafts": [100]}}},
        {"by_place": {"2->target": {"agreement": [float("nan")], "num_drafts": [100]}}},
        {"by_place": {"2->target": {"agreement": [0.5], "num_drafts": [3]}}},
        {"by_place": {"2->target": {"agreement": [0.5, 0.5], "num_drafts": [100]}}},
        {"by_place": {"3->target": places(0.5)}},
    ],
)
def test_what_is_no_measurement_is_an_error_with_a_remedy(report):
    with pytest.raises(ValueError, match="hispec-plan --prompts FILE"):
        measured_acceptance(report, (2,), 6)


def test_acceptance_comes_with_the_adapter(adapter, tmp_path):
    base, folder = adapter
    assert load_adapter(folder, base=base).acceptance == REPORT
    for broken in ("", "[]", '{"acceptance": 3}', "{}"):
        (folder / "run.json").write_text(broken)
        assert load_adapter(folder, base=base).acceptance is None
    (folder / "run.json").unlink()
    assert load_adapter(folder, base=base).acceptance is None


def test_an_engine_plans_for_itself(adapter, cheap):
    base, folder = adapter
    engine = Engine.from_base(base, adapter=folder, plan="auto", max_num_seqs=4)
    setting = engine.plan.engine
    assert setting.method != "autoregressive"
    for name in auto_plan.PLANNED:
        assert getattr(engine.config, name) == getattr(setting, name)
    assert {each.setting.method for each in engine.plan.choices.values()} <= {setting.method, "autoregressive"}
    printed = describe(engine.plan)
    assert all(str(engine.plan.at(size)) in printed for size in (1, 2, 4))
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    assert [c.token_ids for c in completions] == [reference(base, prompt, 12) for prompt in PROMPTS]
    assert cheap == [4]


def test_drafts_of_a_planned_engine_go_on_by_confidence_on_a_cpu_alone(base, cheap, monkeypatch):
    base = shallow(base, 2)
    model = build_heads(base, "good", (2,))
    model.acceptance = {"by_place": {"2->target": places(0.7)}}
    engine = Engine(model, plan="auto", max_num_seqs=2)
    assert engine.config.method == "single-layer"
    assert engine._hierarchy._round_policy.by_confidence
    # A head that is sure goes on, one that is not does not.
    prompts, params = [prompt * 9 for prompt in PROMPTS[:2]], SamplingParams(max_new_tokens=24, ignore_eos=True)
    drafted = []
    for factor in (0.0, 50.0):
        sure = build_heads(base, "good", (2,))
        sure.acceptance = model.acceptance
        with torch.no_grad():
            sure.heads[0].norm.weight.mul_(factor)
        engine = Engine(sure, plan="auto", max_num_seqs=2, ngram_drafts=False)
        texts = engine.generate(prompts, params)
        assert [text.token_ids for text in texts] == [reference(base, prompt, 24) for prompt in prompts]
        drafted.append(engine.stats.levels["target"].drafted_per_position)
    assert len(drafted[0]) == 1 < len(drafted[1])
    monkeypatch.setattr(auto_plan, "machine_key", lambda model, options: "a GPU")
    monkeypatch.setattr(type(model.backbone), "device", property(lambda self: torch.device("cuda")))
    assert not auto_plan.make_plan(model, {"max_num_seqs": 2}, Engine).round_policy.by_confidence


def test_a_machine_is_measured_once(adapter, cheap):
    base, folder = adapter
    for _ in range(2):
        Engine.from_base(base, adapter=folder, plan="auto", max_num_seqs=4)
    assert len(cheap) == 1
    Engine.from_base(base, adapter=folder, plan="auto", max_num_seqs=4, replan=True)
    assert len(cheap) == 2
    Engine.from_base(base, adapter=folder, plan="auto", max_num_seqs=4, block_size=8)
    assert len(cheap) == 3


def test_heads_that_are_never_right_do_not_serve(adapter, cheap):
    base, folder = adapter
    model = load_adapter(folder, base=base)
    nothing = {name: places(0.0) for name in REPORT["by_place"]}
    model.acceptance = {"by_place": nothing}
    engine = Engine(model, plan="auto", max_num_seqs=2)
    assert engine.plan.engine.method == "autoregressive"
    assert "no draft brings" in describe(engine.plan)
    assert engine.config.method == "ngram"  # whose drafts need no heads
    plain = Engine(model, plan="auto", max_num_seqs=2, ngram_drafts=False)
    assert plain.config.method == "autoregressive"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hispec"}, "plan='auto' does not go with method='hispec', which it chooses"),
        ({"num_draft_tokens": 3}, "does not go with num_draft_tokens=3"),
        ({"exit_layers": (2,)}, "does not go with exit_layers"),
        ({"draft_policy": "dynamic"}, "does not go with draft_policy='dynamic', which it chooses"),
        ({"exact": True}, "does not go with exact=True"),
        ({"plan": "best"}, "plan 'best' is unknown"),
        ({"plan": None, "replan": True}, "replan goes with plan='auto' alone"),
    ],
)
def test_options_that_contradict_are_refused(adapter, cheap, options, message):
    base, folder = adapter
    with pytest.raises(ValueError, match=message):
        Engine(load_adapter(folder, base=base), **({"plan": "auto"} | options))
    assert cheap == []


def test_heads_without_a_measurement_are_refused_before_the_machine_is_measured(base, cheap):
    with pytest.raises(ValueError, match="does not tell how often each exit is right"):
        Engine(build_heads(base, "random"), plan="auto")
    assert cheap == []


def test_a_real_measurement_leads_to_a_plan(adapter, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "NUM_REPEATS", (1, 1))
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    base, folder = adapter
    engine = Engine.from_base(base, adapter=folder, plan="auto", max_num_seqs=2)
    assert engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8))[0].token_ids == reference(base, PROMPTS[0], 8)


def rounds(base, kind, exits=(2, 4)):
    """Acceptance of heads of a kind, counted on texts of the base."""
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    return measure_acceptance(build_heads(base, kind, exits), Engine, [[n + 3, n] for n in range(10)], params)


def test_what_was_measured_on_prompts_is_preferred(adapter, cheap):
    base, folder = adapter
    model = load_adapter(folder, base=base)
    assert known_acceptance(model) == measured_acceptance(REPORT, (2, 4), 6)
    write_acceptance(model, 0.0, "a", rounds(base, "adversarial"))
    assert known_acceptance(model).hops[2, 6] == (0.0,)
    assert read_acceptance(model, 0.0, "a") is not None
    assert read_acceptance(model, 0.0, "b") is None
    engine = Engine(model, plan="auto", max_num_seqs=2)
    assert engine.plan.engine.method == "autoregressive"  # and the adapter's own figures say otherwise
    # At another temperature, for other weights and for other exits it says nothing.
    assert known_acceptance(model, 0.7) == measured_acceptance(REPORT, (2, 4), 6, greedy=False)
    trained = load_adapter(folder, base=base)
    with torch.no_grad():
        for parameter in trained.heads.parameters():
            parameter += 0.5
    assert read_acceptance(trained, 0.0) is None
    assert read_acceptance(build_heads(base, "good", (2,)), 0.0) is None


def test_damaged_or_foreign_files_are_ignored(adapter, cheap, tmp_path):
    base, folder = adapter
    model = load_adapter(folder, base=base)
    found = rounds(base, "adversarial")
    write_acceptance(model, 0.0, "a", found)
    (path,) = (tmp_path / "cache" / "costs").iterdir()
    whole = path.read_text()
    record = json.loads(whole)
    foreign = record | {"key": record["key"] | {"weights": "other"}}
    wrong = [json.dumps(record | {"courses": each}) for each in (None, 3, [], {}, [None], record["courses"][1:])]
    for text in ("", "[]", "null", "{}", whole[: len(whole) // 2], json.dumps(foreign), *wrong):
        path.write_text(text)
        assert read_acceptance(model, 0.0) is None
        assert known_acceptance(model) == measured_acceptance(REPORT, (2, 4), 6)
    path.write_bytes(b"\xff\xfe\x00")
    assert read_acceptance(model, 0.0) is None
    path.unlink()
    path.mkdir()  # a disk that refuses
    write_acceptance(model, 0.0, "a", found)
    assert read_acceptance(model, 0.0) is None


def test_rounds_of_a_report_go_before_its_shares(base):
    base = shallow(base, 2)
    never, always = rounds(base, "adversarial"), rounds(base, "good")
    courses = {"greedy": acceptance_to_list(always), "sampled": acceptance_to_list(never)}
    report = REPORT | {"courses": json.loads(json.dumps(courses))}
    assert measured_acceptance(report, (2, 4), 6).hops == always.hops
    assert measured_acceptance(report, (2, 4), 6, greedy=False).hops == never.hops
    assert measured_acceptance(report, (2,), 6).hops == {(2, 6): always.hops[2, 6]}
    for broken in (None, 3, [], {"greedy": None}, {"greedy": courses["greedy"][1:]}):
        found = measured_acceptance(REPORT | {"courses": broken}, (2, 4), 6)
        assert found == measured_acceptance(REPORT, (2, 4), 6)


def test_acceptance_is_measured_on_prompts(base):
    base = shallow(base, 2)
    good = build_heads(base, "good", (2, 4))
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [[number + 3, number] for number in range(10)]
    found = measure_acceptance(good, Engine, prompts, params)
    assert set(found.hops) == {(2, 4), (2, 6), (4, 6)}
    assert all(share == 1.0 for shares in found.hops.values() for share in shares)
    bad = measure_acceptance(build_heads(base, "adversarial", (2,)), Engine, prompts, params)
    assert bad.hops == {(2, 6): (0.0,)}


def test_a_probe_counts_what_is_committed_while_all_decode(base):
    base = shallow(base, 2)
    model = build_heads(base, "good", (2, 4))
    setting = Setting(method="single-layer", exit_layers=(2,), num_draft_tokens=3)
    probe = RateProbe(model, Engine, setting, PROMPTS, SamplingParams(max_new_tokens=41, ignore_eos=True), 2)
    probe.run(0.2)
    assert probe.tokens_per_round == pytest.approx(4.0)
    assert probe.tokens_per_second == pytest.approx(2 * 4.0 / probe.seconds_per_round)
    probe.close()


def test_paper_costs_are_rooflines():
    shape, heads = SHAPES["llama3-8b"], [Head(exit_layer=4), Head(exit_layer=8, kind="mlp", draft_vocab_size=32768)]
    assert shape.layer_weights == 218_103_808
    device = Device(bandwidth=1e12, flops=1e14, launch=0.0)
    found = costs_on_paper(shape, device, heads, context=0)
    assert found.layer.at(1, 1) == pytest.approx(2 * 218_103_808 / 1e12)
    assert found.layer.at(1, 17) == found.layer.at(1, 1)  # bound by memory
    assert found.layer.at(64, 17) == pytest.approx(64 * 17 * 2 * 218_103_808 / 1e14)  # by arithmetic
    assert found.exit_heads[8].at(1, 1) < found.exit_heads[4].at(1, 1)
    longer = costs_on_paper(shape, device, heads, context=4096)
    assert longer.layer.at(16, 1) > 1.5 * found.layer.at(16, 1)
    slower = costs_on_paper(shape, Device(bandwidth=1e12, flops=1e14, launch=1e-5), heads, context=0)
    assert slower.layer.at(1, 1) == pytest.approx(found.layer.at(1, 1) + 1e-5)


def test_acceptance_on_paper():
    assert acceptance_on_paper((4,), 32, (0.6,)).hops == {(4, 32): (0.6,)}
    two = acceptance_on_paper((4, 8), 32, (0.7, 0.8))
    assert two == Acceptance(hops={(4, 8): (0.7,), (8, 32): (0.8,), (4, 32): (pytest.approx(0.56),)})
    for exits, rates in (((4,), (0.5, 0.5)), ((4, 8), (0.5,)), ((4,), (1.5,)), ((), (0.5,)), ((4,), (float("nan"),))):
        with pytest.raises(ValueError, match="acceptance rate"):
            acceptance_on_paper(exits, 32, rates)


def test_devices():
    assert parse_device("a100") is DEVICES["a100"]
    assert parse_device("bandwidth=1e12,flops=2e13,launch=0") == Device(bandwidth=1e12, flops=2e13, launch=0)
    for wrong in ("tpu", "bandwidth=1", "bandwidth=x,flops=1,launch=1", "bandwidth=1,flops=1,launch=1,more=1"):
        with pytest.raises(ValueError, match=r"is neither .*h100"):
            parse_device(wrong)
    with pytest.raises(ValueError, match="a device's flops is -1"):
        parse_device("bandwidth=1,flops=-1,launch=0")


def test_the_command_on_paper(capsys):
    flags = ["--what-if", "llama3-8b", "--device", "h100", "--acceptance", "0.8,0.9"]
    assert command.main([*flags, "--batch-size", "1,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["batch", "1", "16", 'plan="auto"']
    assert "hispec at 4, 8" in lines[1]
    assert "for up to 16 sequences: hispec at 4, 8; tokens drafted, by sequences that run, 1: " in lines[3]
    assert command.main([*flags[:-1], "0.01,0.01", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["batch_size"] for record in records] == [1, 4, 16]
    assert {record["setting"]["method"] for record in records} == {"autoregressive"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--what-if", "qwen3-8b"], "needs --acceptance"),
        (["--what-if", "qwen3-8b", "--acceptance", "0.5,0.5", "--exit-layers", "9,4"], "must rise within 0 to 35"),
        (["--what-if", "qwen3-8b", "--acceptance", "0.5", "--exit-layers", "36"], "must rise within 0 to 35"),
        (["--what-if", "qwen3-8b", "--acceptance", "0.5", "--device", "tpu"], "the device 'tpu' is neither"),
        (["--verify"], "--verify needs --prompts"),
        (["--acceptance", "0.5"], "go with --what-if"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert command.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("hispec-plan: error: ")
    assert message in error


def test_the_command_on_a_model(adapter, cheap, tmp_path, capsys, monkeypatch):
    base, folder = adapter
    base.save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    model = ["--model", str(tmp_path / "base"), "--adapter", str(folder), "--dtype", "float32"]
    assert command.main([*model, "--batch-size", "1,2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row[0].isdecimal()] == ["1", "2"]
    assert command.main([*model, "--batch-size", "2", "--json"]) == 0
    (record,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert record["batch_size"] == 2
    assert cheap == [2]
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "run.json").unlink()
    bare = ["--model", str(tmp_path / "base"), "--adapter", str(tmp_path / "bare"), "--dtype", "float32"]
    assert command.main(bare) == 2
    assert "hispec-plan --prompts FILE" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{3 + number} w7"}}\n' for number in range(12)))
    flags = ["--prompts", str(prompts), "--max-new-tokens", "60", "--batch-size", "2"]
    assert command.main([*bare, *flags]) == 0
    assert "hispec" in capsys.readouterr().out
    # It was kept: nothing is measured again, and the bare adapter needs no prompts any more.
    monkeypatch.setattr(command, "measure_acceptance", None)
    assert command.main([*bare, *flags]) == 0
    assert command.main(bare) == 0
    with pytest.raises(TypeError):
        command.main([*bare, *flags, "--replan"])
    with pytest.raises(TypeError):
        command.main([*bare, *flags, "--limit", "11"])


def test_shared_heads_of_an_alias_are_measured_on_prompts(make_base, cheap, tmp_path, capsys, monkeypatch):
    base = make_base("llama", num_hidden_layers=10)
    monkeypatch.setattr(engine_module, "load_base", lambda *_, **__: (base, build_tokenizer()))
    model = ["--model", "layerskip-llama2", "--batch-size", "1"]
    assert command.main(model) == 2
    assert "hispec-plan --prompts FILE" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hispec-plan --prompts FILE"):
        Engine.from_pretrained("layerskip-llama2", plan="auto", num_blocks=20)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{3 + number} w7"}}\n' for number in range(12)))
    assert command.main([*model, "--prompts", str(prompts), "--max-new-tokens", "60"]) == 0
    assert command.main(model) == 0
    assert Engine.from_pretrained("layerskip-llama2", plan="auto", num_blocks=20).plan is not None


def test_the_benchmark_plans_and_runs_the_plan(adapter, cheap, tmp_path, capsys):
    base, folder = adapter
    base.save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    model = ["--model", str(tmp_path / "base"), "--adapter", str(folder), "--dtype", "float32"]
    capsys.readouterr()
    assert bench.main([*model, "--plan", "--batch-size", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert command.main([*model, "--batch-size", "1,2"]) == 0
    assert printed == capsys.readouterr().out
    prompts = tmp_path / "short.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{3 + number} w7"}}\n' for number in range(3)))
    flags = ["--prompts", str(prompts), "--max-new-tokens", "8", "--repeats", "1", "--output", str(tmp_path / "out")]
    assert bench.main([*model, *flags, "--methods", "auto", "--batch-size", "1,2"]) == 0
    cells = json.loads((tmp_path / "out" / "benchmark.json").read_text())["cells"]
    assert {(cell["method"], cell["batch_size"]) for cell in cells} >= {("auto", 1), ("auto", 2)}
    assert cheap == [2]  # one engine for both sizes; the benchmark finds again what the plan measured


def test_verify_prints_what_was_measured_beside_what_was_said(adapter, cheap, tmp_path, capsys, monkeypatch):
    for name, value in {"SECONDS": 0.005, "NUM_TURNS": 1, "COST_TURNS": 1}.items():
        monkeypatch.setattr(f"hispec.infer.plan_check.{name}", value)
    base, folder = adapter
    base.save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{3 + number} w7"}}\n' for number in range(12)))
    flags = ["--model", str(tmp_path / "base"), "--adapter", str(folder), "--dtype", "float32"]
    flags += ["--prompts", str(prompts), "--max-new-tokens", "30", "--batch-size", "2"]
    assert command.main([*flags, "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "batch 2" in printed
    assert printed.count("<- chosen") == 1
    assert "autoregressive" in printed
    *_, result, auto = printed.splitlines()
    assert "predictions are off by" in result
    assert "of the best measured" in result
    assert re.search(r"a step of each in turn, prefill included: \d+\.\d\d at batch 2$", auto)
    assert command.main([*flags, "--verify", "full", "--json"]) == 0
    _, checked, result, auto = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert auto["auto_to_plain"].keys() == {"2"}
    rows = checked["measured"]
    assert len({row["setting"] for row in rows}) == len(rows) >= 13
    assert sum(row["is_chosen"] for row in rows) == 1
    for row in rows:
        assert row["tokens_per_round"] == pytest.approx(row["predicted_tokens_per_round"], rel=1e-4)
        assert row["error"] == pytest.approx(row["predicted_tokens_per_second"] / row["tokens_per_second"] - 1)
        seconds = sum(row["seconds_by_level"].values())
        assert row["tokens_per_second"] == pytest.approx(2 * row["tokens_per_round"] / seconds)
    errors = sorted(abs(row["error"]) for row in rows)
    assert result["summary"]["median_error"] == pytest.approx(statistics.median(errors))
    (chosen,) = (row["tokens_per_second"] for row in rows if row["is_chosen"])
    assert result["summary"]["choice_share"] == pytest.approx(chosen / max(row["tokens_per_second"] for row in rows))
    assert result["summary"]["num_configurations"] == len(rows)
