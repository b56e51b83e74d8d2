"""From recipe to adapter: responses, cache, heads, measurement, adapter; every stage goes on where it was."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from ..checkpoints import fingerprint, run_record, save_adapter
from ..heads import EarlyExitModel
from ..infer import Engine
from ..recipes import DataRecipe, Recipe, default_exit_layers
from .cache import StateCache
from .cache_writer import extend_cache
from .evaluate import evaluate
from .exit_states import exit_heads
from .prompts import Prompt, fingerprint_prompts, is_held_out, read_prompts
from .responses import Response, read_beginning, regenerate, response_order
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
    engine = make_engine(base, tokenizer, prompts, data)
    keep_settings(
        folder / "responses.json",
        {
            "base": fingerprint(base)["weights"],
            "dtype": str(base.dtype),
            "prompts": fingerprint_prompts(prompts),
            "greedy": data.greedy,
            "num_sampled": data.num_sampled,
            "temperature": data.temperature,
            "max_new_tokens": data.max_new_tokens,
            "seed": seed,
        },
    )
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


def finished_responses(folder: Path, data: DataRecipe, *, seed: int) -> list[Response]:
    """What `regenerate_responses` has made so far, in its final order: to cache and train on a part."""
    prompts = read_prompts(data.prompts_path())
    return read_beginning(folder / "responses.jsonl", order_responses(prompts, data, seed=seed))


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
    values = recipe.to_dict()
    if any(True for _ in model.heads.parameters()):
        settings = {
            "heads": values["heads"],
            "training": {name: value for name, value in values["training"].items() if name not in HARMLESS},
            "held_out_fraction": recipe.data.held_out_fraction,
            "num_responses": len(training),
        }
        trainer = Trainer(
            model,
            cache,
            training,
            held_out,
            folder,
            settings=settings,
            resume=resume,
            **asdict(recipe.training),
        )
        trainer.run()
    model.heads.to(base.dtype)
    report = evaluate(model, cache, held_out, max_window=recipe.training.max_window, show_progress=True)
    record = run_record(command=command or ["hispec.train"], recipe=values, acceptance=report)
    record["num_training_responses"] = len(training)
    record["num_training_tokens"] = sum(len(cache.sequences[index].token_ids) for index in training)
    save_adapter(model, folder / "adapter", run=record)
    return folder / "adapter"


def make_model(base: PreTrainedModel, recipe: Recipe, responses: Sequence[Response]) -> EarlyExitModel:
    """New heads; their draft vocabulary is what `responses` say most often."""
    assert recipe.heads.exit_layers is not None
    model = EarlyExitModel.from_configs(base, recipe.heads.configs(recipe.heads.exit_layers))
    size = recipe.heads.draft_vocab_size
    if size is not None:
        ids = frequent_tokens(responses, size, model.backbone.vocab_size).to(model.backbone.device)
        for head in exit_heads(model):
            assert head.draft_vocab_ids is not None
            head.draft_vocab_ids.copy_(ids)
        model.refresh_draft_vocab()
    return model


def make_engine(base: PreTrainedModel, tokenizer: Any, prompts: Sequence[Prompt], data: DataRecipe) -> Engine:
    """An engine for the base alone, with blocks for a full batch; ValueError names a bad prompt."""
    model = EarlyExitModel.from_configs(base, [])
    renderer = Engine(model, tokenizer, method="autoregressive", max_num_seqs=1, num_blocks=1)
    longest = 0
    for prompt in prompts:
        try:
            longest = max(longest, len(renderer.encode_turn(prompt.text)))
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from None
    length = min(longest + data.max_new_tokens, model.backbone.max_context)
    return Engine(
        model,
        tokenizer,
        method="autoregressive",
        max_num_seqs=data.batch_size,
        num_blocks=data.batch_size * (math.ceil(length / renderer.config.block_size) + 1),
    )


def check_split(prompts: Sequence[Prompt], fraction: float) -> None:
    """Raise ValueError, before hours of work, where the split leaves nothing to train or to measure on."""
    num_held_out = sum(is_held_out(prompt.id, fraction) for prompt in prompts)
    if num_held_out in (0, len(prompts)):
        raise ValueError(
            f"held_out_fraction {fraction} holds out {num_held_out} of {len(prompts)} prompts; "
            "give more prompts or another fraction"
        )


def keep_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings that made a stage; raises ValueError where it was made with others."""
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if earlier.get(name) != value:
                raise ValueError(
                    f"{path.parent} was begun with {name} {earlier.get(name)}, now it is {value}; "
                    "use another --output folder or the settings it was begun with"
                )
        return
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
