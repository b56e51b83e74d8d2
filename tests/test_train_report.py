"""The report of a real, tiny run: its numbers are those of run.json, its tables and figures are well formed."""

import json
import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

from hispec.checkpoints import fingerprint, save_adapter
from hispec.checkpoints.adapter import TENSOR_PREFIX
from hispec.checkpoints.figure import Line, draw_bars, draw_lines, shorten, ticks
from hispec.checkpoints.markdown import table
from hispec.heads import EarlyExitModel
from hispec.infer.planner import measured_acceptance
from hispec.recipes import recipe_from_dict
from hispec.train import describe_acceptance, train_adapter
from hispec.train.cache_writer import extend_cache
from hispec.train.record import predicted_lengths
from hispec.train.report import describe_report, report_files
from hispec.train.sections import judge_levels, main_hops

from .train_support import random_responses

EXITS = ("0", "2", "4")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("someone")
    values = {
        "model": {"source": str(folder / "model")},
        "heads": {"exit_layers": [0, 2, 4], "kinds": ["block", "norm", "mlp"], "draft_vocab_size": 48},
        "data": {"held_out_fraction": 0.2, "prompts": str(folder / "prompts.jsonl")},
        "training": {"batch_tokens": 64, "warmup_steps": 1, "eval_interval": 2, "max_steps": 5},
    }
    return recipe_from_dict(values, name="tiny_|run")


@pytest.fixture(scope="module")
def cache(request, tmp_path_factory):
    base = request.getfixturevalue("base")
    responses = [
        replace(response, kind="a|`<odd>`\n\x00kind" if response.kind == "odd" else response.kind)
        for response in random_responses(80)
    ]
    backbone = EarlyExitModel.from_configs(base, []).backbone
    folder = tmp_path_factory.mktemp("cache")
    return extend_cache(folder, responses, backbone, [2, 4], fingerprint=fingerprint(base))


@pytest.fixture(scope="module")
def adapter(request, recipe, cache, tmp_path_factory):
    """Three exits, trained for a few steps."""
    folder = tmp_path_factory.mktemp("run")
    command = ["/home/someone/.venv/bin/hispec-train", "--output", str(folder), "--data", "/data/a b.jsonl"]
    return train_adapter(folder, cache, request.getfixturevalue("base"), recipe, command=command)


@pytest.fixture(scope="module")
def run(adapter):
    return json.loads((adapter / "run.json").read_text())


def read_tables(text):
    """By the first cell of the header: the rows of every table, unescaped; each is as wide as its header."""
    tables, rows = {}, []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            assert line.startswith("| ")
            assert line.endswith(" |")
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            rows.append([re.sub(r"\\(.)", r"\1", cell.strip()) for cell in cells])
            assert len(rows[-1]) == len(rows[0]), line
        elif rows:
            assert rows[1] == ["---", *["--:"] * (len(rows[0]) - 1)]
            tables.setdefault(rows[0][0], []).append([rows[0], *rows[2:]])
            rows = []
    return tables


def shown(value):
    return f"{value:.3f}"


def pair(values):
    return f"{values['agreement']:.3f} / {values['acceptance']:.3f}"


def test_numbers_are_those_of_the_record(adapter, run):
    tables = read_tables((adapter / "report.md").read_text())
    measured = run["acceptance"]
    hops = [f"{a}->{b}" for a, b in combinations((*EXITS, "target"), 2)]
    names = [hop.replace("->", " → ") for hop in hops]
    assert list(measured["hops"]) == hops

    by_hop, by_distance, by_place = tables["from → to"]
    assert by_hop[1:] == [
        [name, shown(measured["hops"][hop]["agreement"]), shown(measured["hops"][hop]["acceptance"])]
        for name, hop in zip(names, hops, strict=True)
    ]
    assert list(measured["by_distance"]) == list("12345678") == by_distance[0][1:] == by_place[0][1:]
    for name, hop, row, places in zip(names, hops, by_distance[1:], by_place[1:], strict=True):
        assert row == [name, *(pair(values[hop]) for values in measured["by_distance"].values())]
        shares = measured["by_place"][hop]["agreement"]
        assert places == [name, *map(shown, shares), *["-"] * (8 - len(shares))]
    (by_kind,) = tables["kind"]
    assert by_kind[0][2:] == [name for name, hop in zip(names, hops, strict=True) if hop in main_hops(hops)]
    for kind, row in zip(measured["by_kind"], by_kind[1:], strict=True):
        expected = [pair(measured["by_kind"][kind][hop]) for hop in main_hops(hops)]
        assert row[1:] == [str(measured["num_tokens_by_kind"][kind]), *expected]
        assert set(measured["by_kind"][kind]) == set(hops)
    assert sum(measured["num_tokens_by_kind"].values()) == measured["num_tokens"] > 100

    (curve,) = tables["step"]
    assert [int(row[0]) for row in curve[1:]] == [record["step"] for record in run["curve"]] == [0, 2, 4, 5]
    for row, record in zip(curve[2:], run["curve"][1:], strict=True):
        assert row[2:5] == [shown(record["loss"][exit]) for exit in EXITS]
        assert row[5:] == [shown(record[hop]["agreement"]) for hop in main_hops(hops)]
    (lengths,) = tables["num_draft_tokens"]
    predicted = run["predicted_length"]
    assert list(predicted["single-layer"]) == list(EXITS)
    assert list(predicted["hispec"]) == ["0->2", "0->4", "2->4"]
    values = [
        predicted[method][exits][rule]
        for method in ("single-layer", "hispec")
        for exits in predicted[method]
        for rule in ("greedy", "sampled")
    ]
    assert [row[1:] for row in lengths[1:]] == [[f"{value:.2f}" for value in row] for row in values]
    (sure,) = tables["confidence"]
    for column, exit in enumerate(EXITS, 1):
        cells = [row[column] for row in sure[1:] if row[column] != "-"]
        entries = measured["calibration"][exit]
        assert cells == [f"{entry['agreement']:.3f} of {entry['num_tokens']}" for entry in entries]
        assert sum(entry["num_tokens"] for entry in entries) == measured["num_tokens"]
    (heads,) = tables["layers run"]
    assert [row[:4] for row in heads[1:]] == [
        ["0", "block", "yes", "48"],
        ["2", "norm", "yes", "48"],
        ["4", "mlp", "yes", "48"],
    ]
    assert [row[4] for row in heads[1:]] == [str(head["num_parameters"]) for head in run["heads"]]
    assert run["heads"][1]["num_parameters"] == 32 + 2 * 32 * 32


def test_sizes_are_those_of_the_saved_tensors(adapter, run):
    tensors = load_file(adapter / "adapter_model.safetensors")
    for index, head in enumerate(run["heads"]):
        own = [tensor for name, tensor in tensors.items() if name.startswith(f"{TENSOR_PREFIX}{index}.")]
        assert own
        assert head["num_bytes"] == sum(tensor.nbytes for tensor in own)
        assert head["num_parameters"] == sum(tensor.numel() for tensor in own if tensor.is_floating_point())


def test_prediction_takes_what_was_counted_along_the_responses(run):
    found = measured_acceptance(run["acceptance"], (0, 2, 4), 6)
    sampled = measured_acceptance(run["acceptance"], (0, 2, 4), 6, greedy=False)
    assert found != sampled
    for acceptance, rule in ((found, "greedy"), (sampled, "sampled")):
        for setting, course in acceptance.courses.items():
            name = "->".join(map(str, setting.exit_layers))
            lengths = run["predicted_length"][setting.method][name][rule]
            if setting.method == "single-layer" or setting.num_provisional_tokens == 4:
                assert lengths[setting.num_draft_tokens - 1] == pytest.approx(course.tokens_per_round, abs=1e-4)


def test_prediction_of_a_record_without_rounds_takes_the_measured_shares(run):
    """By hand, for two drafted tokens."""
    measured = {name: value for name, value in run["acceptance"].items() if name != "courses"}
    first, second = measured["by_place"]["2->target"]["agreement"][:2]
    predicted = predicted_lengths(measured, (0, 2, 4))["single-layer"]["2"]
    assert predicted["greedy"][1] == pytest.approx(1 + first + first * second, abs=1e-4)
    first, second = (measured["by_distance"][key]["2->target"]["acceptance"] for key in "12")
    assert predicted["sampled"][1] == pytest.approx(1 + first + first * second, abs=1e-4)


def test_figures_are_xml_and_all_of_them_are_shown(adapter, run):
    text = (adapter / "report.md").read_text()
    named = re.findall(r"!\[[^\]]+\]\((figures/\w+\.svg)\)", text)
    assert sorted(named) == sorted(f"figures/{path.name}" for path in (adapter / "figures").iterdir())
    assert {"figures/loss.svg", "figures/agreement.svg", "figures/length.svg"} <= set(named)
    for name in named:
        root = ElementTree.parse(adapter / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not {"script", "image", "a"} & {element.tag.split("}")[1] for element in root.iter()}
        x_max, y_max = float(root.get("width")), float(root.get("height"))
        for mark in root.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(mark.get("cx")) <= x_max
            assert 0 <= float(mark.get("cy")) <= y_max
    points = ElementTree.parse(adapter / "figures/loss.svg").getroot().findall("{*}polyline")
    assert [len(line.get("points").split()) for line in points] == [len(run["curve"]) - 1] * 3


def test_no_local_path_anywhere(adapter, recipe):
    parts = [recipe.model.source, recipe.data.prompts, str(adapter.parent), "/home/someone", "/data", "/tmp"]
    for path in adapter.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            text = path.read_text()
            assert not [part for part in parts if part in text], path
    assert "hispec-train --output" in (adapter / "report.md").read_text()


def test_the_report_is_made_anew_from_the_record_alone(adapter, run):
    for name, text in report_files(run).items():
        assert (adapter / name).read_text() == text


def contents(adapter):
    """The text of every file but the tensors', without the time that it took."""
    texts = {path: path.read_text() for path in adapter.rglob("*") if path.is_file() and path.suffix != ".safetensors"}
    run = json.loads(texts[adapter / "run.json"])
    del run["usage"]
    return texts | {adapter / "run.json": json.dumps(run)}


def test_the_same_run_again_replaces_it(adapter, recipe, cache, base):
    before = contents(adapter)
    (adapter / "README.md").write_text("mine")
    (adapter / "figures" / "old.svg").write_text("<svg/>")
    command = json.loads((adapter / "run.json").read_text())["command"]
    train_adapter(adapter.parent, cache, base, recipe, command=command)
    after = contents(adapter)
    assert after.pop(adapter / "README.md") == "mine"
    assert after == before


def test_heads_without_training_have_a_report_too(base, cache, recipe, tmp_path):
    heads = replace(recipe.heads, exit_layers=(2, 4), kinds=("shared",), draft_vocab_size=None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')  # of heads that were trained here before
    adapter = train_adapter(tmp_path, cache, base, replace(recipe, heads=heads))
    run = json.loads((adapter / "run.json").read_text())
    text = (adapter / "report.md").read_text()
    tables = read_tables(text)
    assert "Nothing was trained" in text
    assert run["curve"] == []
    assert "step" not in tables
    assert {path.stem for path in (adapter / "figures").iterdir()} == {"position", "kinds", "confidence", "length"}
    distances = list(run["acceptance"]["by_distance"].values())
    assert len(distances) == 8
    assert all(hops == run["acceptance"]["hops"] for hops in distances)  # no head sees a committed state
    assert "all positions are alike" in text
    assert "2->4" in describe_report(adapter)


def test_a_middle_level_that_agrees_no_more_is_called_so(run):
    def judge(draft, middle):
        hops = {"2->target": {"agreement": draft}, "4->target": {"agreement": middle}}
        (sentence,) = judge_levels({"heads": run["heads"][1:], "acceptance": {"hops": hops}})
        return sentence

    assert "**The exit behind 4 layers agrees with the model no more than" in judge(0.5, 0.4)
    assert "50.0 %" in judge(0.5, 0.4)
    assert "no more than" in judge(0.5, 0.5)
    assert "can serve as the middle level" in judge(0.4, 0.5)


def test_the_terminal_shows_what_matters_of_many_exits(run):
    lines = describe_acceptance(run["acceptance"]).splitlines()
    assert lines[1].split() == ["0->2", "0->target", "2->4", "2->target", "4->target"]
    assert lines[2].split()[0] == "all"


def test_a_full_disk_leaves_the_old_report(base, adapter, tmp_path):
    model = EarlyExitModel.from_base(base, (2,), "norm")
    save_adapter(model, tmp_path / "heads", {}, report={"report.md": "old", "figures/a.svg": "<svg/>"})
    with pytest.raises(ValueError, match="cannot write"):
        save_adapter(model, tmp_path / "heads", {}, report={"report.md": "new", "figures/" + "a" * 300 + ".svg": ""})
    assert (tmp_path / "heads" / "report.md").read_text() == "old"
    save_adapter(model, tmp_path / "heads")
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    (tmp_path / "heads" / "figures").mkdir()
    (tmp_path / "heads" / "figures" / "holiday.jpg").write_text("")
    with pytest.raises(ValueError, match=r"other files \(holiday\.jpg\)"):
        save_adapter(model, tmp_path / "heads")


def test_cells_hold_any_text():
    text = table(["a", "b"], [["x|y\nz", "\\|`*_<b>\x00"], ["", "1"]])
    assert read_tables(text)["a"] == [[["a", "b"], ["x|y z", "\\|`*_<b>"], ["", "1"]]]


def test_axes_have_round_values():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(1, 8) == [2, 4, 6, 8]
    assert ticks(3, 3) == [3]
    for high in (1e-3, 0.7, 9, 1_946_680, 5e9):
        assert 3 <= len(ticks(0, high)) <= 6
    assert [shorten(value) for value in (0, 0.25, 500_000, 1_500_000, 2e9)] == ["0", "0.25", "500k", "1.5M", "2G"]


def test_figures_of_nothing_and_of_odd_names_are_xml():
    for svg in (
        draw_lines("<&>", [], x_label="x", y_label="y"),
        draw_lines("one", [Line("a\x00<b>", [(1, 0)])], x_label="x", y_label="y"),
        draw_bars("none", {}, x_label="x"),
        draw_bars("one", {"k\x01&" * 20: {"<a>": 0.5, "b": 1.7}}, x_label="x"),
    ):
        ElementTree.fromstring(svg)
