"""From recipe to adapter: responses, cache, heads, measurement, adapter; every stage goes on where it was."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from ..checkpoints import fingerprint, save_adapter, write_atomically
from ..heads import EarlyExitModel
from ..infer import Engine
from ..recipes import DataRecipe, Recipe, default_exit_layers
from .cache import StateCache
from .cache_writer import extend_cache
from .curve import read_curve
from .evaluate import evaluate
from .prompts import Prompt, fingerprint_prompts, is_held_out, read_prompts
from .record import training_record
from .report import report_files
from .responses import Response, regenerate, response_order
from .split import split_sequences
from .trainer import Trainer
from .vocabulary import frequent_tokens

HARMLESS = ("eval_interval", "checkpoint_interval")
"""Settings that may change when a run goes on."""


def make_adapter(
    recipe: Recipe,
    base: PreTrainedModel,
    tokenizer: Any,
    *,
    cache_layers: Sequence[int] = (),  # exit layers to cache beside those that get a head
    resume: bool = True,  # False trains the heads anew; responses and cached states that fit are kept
    command: Sequence[str] = (),  # as the user typed it, for the adapter's record
) -> Path:
    """Run every stage in `recipe.output_folder()` and return the adapter's folder.

    The same call again, after an interruption of any kind, goes on where it was.
    """
    folder = recipe.output_folder()
    recipe = resolve(recipe, base)
    folder.mkdir(parents=True, exist_ok=True)
    assert recipe.heads.exit_layers is not None
    with alone_in(folder):
        responses = regenerate_responses(folder, base, tokenizer, recipe.data, seed=recipe.training.seed)
        layers = sorted({*recipe.heads.exit_layers, *cache_layers})
        cache = cache_states(folder, responses, base, layers, max_gb=recipe.data.max_cache_gb)
        return train_adapter(folder, cache, base, recipe, resume=resume, command=command)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; ValueError where one works in it already."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another hispec-train works in {folder}; wait for it or choose another --output") from None


def resolve(recipe: Recipe, base: PreTrainedModel) -> Recipe:
    """The recipe with its exit layers filled in; raises ValueError for heads that the base cannot have."""
    num_layers = EarlyExitModel.from_configs(base, []).backbone.num_layers
    exit_layers = recipe.heads.exit_layers or default_exit_layers(num_layers)
    EarlyExitModel.from_configs(base, recipe.heads.configs(exit_layers))
    return replace(recipe, heads=replace(recipe.heads, exit_layers=exit_layers))


def regenerate_responses(
    folder: Path, base: PreTrainedModel, tokenizer: Any, data: DataRecipe, *, seed: int
) -> list[Response]:
    """The responses of `folder/responses.jsonl`, made as far as they are missing."""
    prompts = read_prompts(data.prompts_path())
    check_split(prompts, data.held_out_fraction)
    engine = make_engine(base, tokenizer, data)
    render(engine, prompts)
    settings = response_settings(engine, prompts, data, seed=seed)
    path = folder / "responses.json"
    if not check_settings(path, settings):
        write_atomically(path, json.dumps(settings, indent=2) + "\n")
    return regenerate(
        engine,
        order_responses(prompts, data, seed=seed),
        folder / "responses.jsonl",
        num_tokens=data.num_tokens,
        max_new_tokens=data.max_new_tokens,
        temperature=data.temperature,
        max_num_seqs=data.batch_size,
        seed=seed,
    )


def order_responses(prompts: Sequence[Prompt], data: DataRecipe, *, seed: int) -> list[tuple[Prompt, int]]:
    """`response_order` by the values of a recipe."""
    return response_order(
        prompts,
        greedy=data.greedy,
        num_sampled=data.num_sampled,
        held_out_fraction=data.held_out_fraction,
        seed=seed,
    )


def cache_states(
    folder: Path,
    responses: Sequence[Response],
    base: PreTrainedModel,
    exit_layers: Sequence[int],
    *,
    max_gb: float,
) -> StateCache:
    """The state cache of `folder/cache`, made as far as it is missing."""
    backbone = EarlyExitModel.from_configs(base, []).backbone
    return extend_cache(
        folder / "cache", responses, backbone, exit_layers, fingerprint=fingerprint(base), max_gb=max_gb
    )


def train_adapter(
    folder: Path,
    cache: StateCache,
    base: PreTrainedModel,
    recipe: Recipe,  # resolved
    *,
    num_tokens: int | None = None,  # response tokens of the cache to train on; None takes all
    resume: bool = True,
    command: Sequence[str] = (),
) -> Path:
    """Train the recipe's heads on a cache, measure them and write `folder/adapter`."""
    training, held_out = split_sequences(cache.sequences, recipe.data.held_out_fraction, num_tokens)
    model = make_model(base, recipe, [cache.sequences[index] for index in training])
    is_trained = any(True for _ in model.heads.parameters())
    if is_trained:
        settings = training_settings(recipe, len(training))
        Trainer(
            model, cache, training, held_out, folder, settings=settings, resume=resume, **asdict(recipe.training)
        ).run()
    model.heads.to(base.dtype)
    record = training_record(
        model,
        command=command or ["hispec.train"],
        recipe=recipe.to_dict(),
        acceptance=evaluate(model, cache, held_out, max_window=recipe.training.max_window, show_progress=True),
        # Where nothing is trained, a curve in the folder is that of other heads.
        curve=read_curve(folder / "metrics.jsonl") if is_trained else [],
        data={
            "num_training_responses": len(training),
            "num_training_tokens": sum(len(cache.sequences[index].token_ids) for index in training),
            "num_held_out_responses": len(held_out),
        },
    )
    save_adapter(model, folder / "adapter", run=record, report=report_files(record))
    return folder / "adapter"


def training_settings(recipe: Recipe, num_responses: int | None) -> dict[str, Any]:
    """What must be the same for a training run to go on; `num_responses` is None where it is not known yet."""
    values = recipe.to_dict()
    return {
        "heads": values["heads"],
        "training": {name: value for name, value in values["training"].items() if name not in HARMLESS},
        "held_out_fraction": recipe.data.held_out_fraction,
        "num_responses": "more than there are yet" if num_responses is None else num_responses,
    }


def make_model(base: PreTrainedModel, recipe: Recipe, responses: Sequence[Response]) -> EarlyExitModel:
    """New heads; their draft vocabulary is what `responses` say most often."""
    assert recipe.heads.exit_layers is not None
    model = EarlyExitModel.from_configs(base, recipe.heads.configs(recipe.heads.exit_layers))
    size = recipe.heads.draft_vocab_size
    if size is not None:
        ids = frequent_tokens(responses, size, model.backbone.vocab_size).to(model.backbone.device)
        for head in model.exit_heads:
            assert head.draft_vocab_ids is not None
            head.draft_vocab_ids.copy_(ids)
        model.refresh_draft_vocab()
    return model


def make_engine(base: PreTrainedModel, tokenizer: Any, data: DataRecipe) -> Engine:
    """An engine for the base alone."""
    model = EarlyExitModel.from_configs(base, [])
    # Nobody waits for single answers: prompts are read as many at once as pays.
    return Engine(model, tokenizer, method="autoregressive", max_num_seqs=data.batch_size, max_prefill_tokens=4096)


def render(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The token ids of each prompt as the base reads it; ValueError names a bad prompt."""
    rendered = []
    for prompt in prompts:
        try:
            rendered.append(engine.encode_turn(prompt.text))
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from None
    return rendered


def check_split(prompts: Sequence[Prompt], fraction: float) -> None:
    """Raise ValueError, before hours of work, where the split leaves nothing to train or to measure on."""
    num_held_out = sum(is_held_out(prompt.id, fraction) for prompt in prompts)
    if num_held_out in (0, len(prompts)):
        raise ValueError(
            f"held_out_fraction {fraction} holds out {num_held_out} of {len(prompts)} prompts; "
            "give more prompts or another fraction"
        )


def response_settings(engine: Engine, prompts: Sequence[Prompt], data: DataRecipe, *, seed: int) -> dict[str, Any]:
    """What must be the same for responses to be added to."""
    base = engine.model.base
    return {
        "base": fingerprint(base)["weights"],
        "dtype": str(base.dtype),
        "prompts": fingerprint_prompts(prompts),
        "tokenizer": fingerprint_tokenizer(engine, prompts),
        "greedy": data.greedy,
        "num_sampled": data.num_sampled,
        "temperature": data.temperature,
        "max_new_tokens": data.max_new_tokens,
        "held_out_fraction": data.held_out_fraction,
        "seed": seed,
    }


def fingerprint_tokenizer(engine: Engine, prompts: Sequence[Prompt]) -> str:
    """Hexadecimal digest of the chat template, and of the prompts' token ids without it.

    Not of the rendered prompts: some templates write today's date.
    """
    digest = hashlib.sha256(json.dumps(getattr(engine.tokenizer, "chat_template", None)).encode())
    for prompt in prompts:
        digest.update(json.dumps(engine.encode(prompt.text)).encode())
    return digest.hexdigest()[:16]


def check_settings(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `path` is there; raises ValueError where a stage was begun with other settings.

    A setting that the file does not know is passed over: an earlier hispec wrote it.
    """
    if not path.exists():
        return False
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict):
        raise ValueError(f"{path} is damaged; remove it if the settings are those the run was begun with")
    for name, value in settings.items():
        if earlier.get(name, value) != value:
            raise ValueError(
                f"{path.parent} was begun with {name} {earlier[name]}, now it is {value}; "
                "use another --output folder or the settings it was begun with"
            )
    return True
