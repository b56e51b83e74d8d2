"""From recipe to adapter: responses, cache, heads, measurement, adapter; every stage goes on where it was."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedModel

from ..checkpoints import check_replaceable, fingerprint, save_adapter, write_atomically
from ..heads import EarlyExitModel
from ..infer import Engine
from ..recipes import DataRecipe, Recipe, resolve_exit_layers
from .cache import StateCache, StateSource
from .cache_writer import extend_cache
from .curve import read_curve
from .data_stage import Data, check_template, load_prompts, open_data, own_settings, prompt_settings, read_sequences
from .evaluate import evaluate
from .heap import give_back
from .online import OnlineStates, check_states
from .preview import show_sample
from .prompts import Prompt, encode_prompt, fingerprint_prompts, is_held_out
from .ranks import Ranks
from .record import training_record
from .report import report_files
from .responses import Response, response_order
from .sequences import SequenceMaker, describe_progress
from .shared_responses import regenerate_over
from .split import split_sequences
from .tracker import check_trackers
from .trainer import Trainer
from .usage import UsageFile
from .vocabulary import frequent_tokens
from .zero import check_zero

PREFILL_TOKENS = 4096
"""Prompt tokens read in a step of regeneration: nobody waits for single answers, so as many at once as pays."""

USAGE_FILE = "usage.json"

HARMLESS = (
    *("eval_interval", "checkpoint_interval", "accumulation_steps", "activation_checkpointing", "save_total_limit"),
    *("save_best", "early_stop", "trackers", "deepspeed"),
)
"""Settings that may change when a run goes on."""


def make_adapter(
    recipe: Recipe,
    base: PreTrainedModel,
    tokenizer: Any,
    *,
    cache_layers: Sequence[int] = (),  # exit layers to cache beside those that get a head
    resume: bool = True,  # False trains the heads anew; responses and cached states that fit are kept
    command: Sequence[str] = (),  # as the user typed it, for the adapter's record
    ranks: Ranks | None = None,  # from `join_ranks`; all of them make this call, on a folder that all of them see
) -> Path:
    """Run every stage in `recipe.output_folder()` and return the adapter's folder.

    The same call again, after an interruption of any kind, goes on where it was, also with another number of ranks.
    """
    ranks = ranks or Ranks()
    folder = recipe.output_folder()
    with ranks.together():
        recipe = resolve(recipe, base)
        check_states(recipe, cache_layers)
        check_adapter_folder(folder, base)
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, ranks):
        usage = UsageFile(folder / USAGE_FILE, base.device, writes=ranks.is_main)
        with usage.stage("responses", anew=not (folder / "responses.jsonl").exists()):
            responses = prepare_responses(folder, base, tokenizer, recipe.data, seed=recipe.training.seed, ranks=ranks)
        give_back()
        states: StateSource
        if recipe.data.states == "online":
            states = OnlineStates(responses)
        else:
            layers = sorted({*recipe.heads.counts(), *cache_layers})
            with usage.stage("cache", anew=not (folder / "cache").exists()):
                states = cache_states(folder, responses, base, layers, max_gb=recipe.data.max_cache_gb, ranks=ranks)
        return train_adapter(folder, states, base, recipe, resume=resume, command=command, ranks=ranks)


def preprocess(recipe: Recipe, base: PreTrainedModel, tokenizer: Any, ranks: Ranks | None = None) -> list[Response]:
    """The data stage alone: what heads would be trained and measured on, in `recipe.output_folder()`.

    `make_adapter` goes on from there.
    """
    ranks = ranks or Ranks()
    folder = recipe.output_folder()
    with ranks.together():
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, ranks):
        return prepare_responses(folder, base, tokenizer, recipe.data, seed=recipe.training.seed, ranks=ranks)


def check_adapter_folder(folder: Path, base: PreTrainedModel) -> None:
    """Raise ValueError, before hours of work, where the run could not write `folder/adapter` at its end, or would
    replace one that it has not made."""
    check_replaceable(folder / "adapter")
    if (folder / "adapter" / "adapter_config.json").exists() and not any(
        (folder / name).exists() for name in ("responses.json", "data.json")
    ):
        raise ValueError(
            f"{folder / 'adapter'} is the adapter of another run, whose responses are not there; choose another "
            "--output folder"
        )
    try:
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
        weights = config["base_fingerprint"]["weights"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if weights != fingerprint(base)["weights"]:
        raise ValueError(
            f"{folder / 'adapter'} is an adapter for another base model; choose another --output, or move it away"
        )


@contextmanager
def alone_in(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of a run's folder; ValueError where one works in it already."""
    with ExitStack() as stack:
        with ranks.together():
            if ranks.is_main:
                try:
                    stack.enter_context(FileLock(folder / ".lock", timeout=0))
                except Timeout:
                    raise ValueError(
                        f"another hispec-train works in {folder}; wait for it or choose another --output"
                    ) from None
        yield


def resolve(recipe: Recipe, base: PreTrainedModel) -> Recipe:
    """The recipe with its exit layers filled in; raises ValueError for heads that the base cannot have.

    And for what the training needs and does not find here.
    """
    num_layers = EarlyExitModel.from_configs(base, []).backbone.num_layers
    exit_layers = resolve_exit_layers(recipe.heads.exit_layers, num_layers)
    EarlyExitModel.from_configs(base, recipe.heads.configs(exit_layers))
    recipe.training.check_exits(len(exit_layers))
    training = recipe.training
    check_trackers(training.trackers)
    if training.deepspeed is not None:
        check_zero(training)
    return replace(recipe, heads=replace(recipe.heads, exit_layers=exit_layers))


def prepare_responses(
    folder: Path, base: PreTrainedModel, tokenizer: Any, recipe: DataRecipe, *, seed: int, ranks: Ranks | None = None
) -> list[Response]:
    """The responses of `folder/responses.jsonl`: those of the data, or where it has none those of the base."""
    ranks = ranks or Ranks()
    with ranks.together():
        data = open_data(recipe, folder)
        print(f"data: {data.describe()}", file=sys.stderr)
        check_template(data, tokenizer)
    if not data.is_trained_on:
        responses = regenerate_responses(folder, base, tokenizer, data, seed=seed, ranks=ranks)
    else:
        responses = []
        # One rank reads the data; the others then find that all is done.
        for is_turn in (ranks.is_main, not ranks.is_main):
            with ranks.together():
                if is_turn:
                    maker, settings = open_sequences(folder, base, tokenizer, data, seed=seed)
                    responses, progress = read_sequences(folder, data, maker, settings, num_tokens=recipe.num_tokens)
                    print(f"data: {describe_progress(progress, settings['max_length'])}", file=sys.stderr)
    with ranks.together():
        split_sequences(responses, recipe.held_out_fraction)
        show_sample(responses[0], tokenizer, sys.stderr)
    return responses


def open_sequences(
    folder: Path, base: PreTrainedModel, tokenizer: Any, data: Data, *, seed: int
) -> tuple[SequenceMaker, dict[str, Any]]:
    """What makes sequences of the data, and with which settings; ValueError where `folder` was begun with others."""
    if (folder / "responses.json").exists():
        raise ValueError(
            f"{folder} was begun with responses of the base, now the data's own are to be trained on; "
            "use another --output folder or --regenerate"
        )
    backbone = EarlyExitModel.from_configs(base, []).backbone
    max_length = min(data.recipe.max_length, backbone.max_context)
    settings = own_settings(data, tokenizer, max_length=max_length, seed=seed)
    check_settings(folder / "data.json", settings)
    return SequenceMaker(tokenizer, backbone.vocab_size, max_length), settings


def regenerate_responses(
    folder: Path, base: PreTrainedModel, tokenizer: Any, opened: Data, *, seed: int, ranks: Ranks
) -> list[Response]:
    """The base's responses to the prompts of the data, made as far as they are missing."""
    data = opened.recipe
    with ranks.together():
        check_settings(folder / "data.json", prompt_settings(opened))
        engine = make_engine(base, tokenizer, data)
        prompts = load_prompts(folder, opened, engine, write=ranks.is_main)
        check_split(prompts, data.held_out_fraction)
        render(engine, prompts)
        settings = response_settings(engine, prompts, data, seed=seed)
        path = folder / "responses.json"
        if not check_settings(path, settings) and ranks.is_main:
            write_atomically(path, json.dumps(settings, indent=2) + "\n")
    return regenerate_over(
        ranks,
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
    ranks: Ranks,
) -> StateCache:
    """The state cache of `folder/cache`, made as far as it is missing."""
    backbone = EarlyExitModel.from_configs(base, []).backbone
    return extend_cache(
        folder / "cache", responses, backbone, exit_layers, fingerprint=fingerprint(base), max_gb=max_gb, ranks=ranks
    )


def train_adapter(
    folder: Path,
    cache: StateSource,
    base: PreTrainedModel,
    recipe: Recipe,  # resolved
    *,
    num_tokens: int | None = None,  # response tokens of the cache to train on; None takes all
    resume: bool = True,
    command: Sequence[str] = (),
    ranks: Ranks | None = None,
) -> Path:
    """Train the recipe's heads on a cache, measure them and write `folder/adapter`."""
    ranks = ranks or Ranks()
    usage = UsageFile(folder / USAGE_FILE, base.device, writes=ranks.is_main)
    with ranks.together():
        training, held_out = split_sequences(cache.sequences, recipe.data.held_out_fraction, num_tokens)
        model = make_model(base, recipe, [cache.sequences[index] for index in training])
    is_trained = any(True for _ in model.heads.parameters())
    if is_trained:
        settings = training_settings(recipe, base, [cache.sequences[index] for index in training])
        options = {"settings": settings, "resume": resume, "ranks": ranks, **asdict(recipe.training)}
        with usage.stage("train", anew=not resume or not (folder / "checkpoints").exists()):
            Trainer(model, cache, training, held_out, folder, **options).run()
    model.heads.to(base.dtype)
    with ranks.together():
        if ranks.is_main:
            with usage.stage("evaluate", anew=True):
                report = evaluate(model, cache, held_out, max_window=recipe.training.max_window, show_progress=True)
            record = training_record(
                model,
                command=command or ["hispec.train"],
                recipe=recipe.to_dict(),
                acceptance=report,
                # Where nothing is trained, a curve in the folder is that of other heads.
                curve=read_curve(folder / "metrics.jsonl") if is_trained else [],
                data={
                    "num_training_responses": len(training),
                    "num_training_tokens": sum(cache.sequences[index].num_answer_tokens for index in training),
                    "num_held_out_responses": len(held_out),
                },
            )
            record["usage"] = usage.read()
            save_adapter(model, folder / "adapter", run=record, report=report_files(record))
    return folder / "adapter"


def training_settings(
    recipe: Recipe,
    base: PreTrainedModel,
    responses: Sequence[Response] | None,  # those that are trained on; None where they are not known yet
) -> dict[str, Any]:
    """What must be the same for a training run to go on."""
    values = recipe.to_dict()
    return {
        "heads": values["heads"],
        "training": {name: value for name, value in values["training"].items() if name not in HARMLESS},
        "held_out_fraction": recipe.data.held_out_fraction,
        "num_responses": "more than there are yet" if responses is None else len(responses),
        # What tells two runs of the same recipe from each other.
        "base": fingerprint(base)["weights"],
        "responses": "not known yet" if responses is None else _digest(responses),
    }


def _digest(responses: Sequence[Response]) -> str:
    digest = hashlib.sha256()
    for response in responses:
        digest.update(json.dumps([response.prompt_token_ids, response.token_ids]).encode())
    return digest.hexdigest()[:16]


def make_model(base: PreTrainedModel, recipe: Recipe, responses: Sequence[Response]) -> EarlyExitModel:
    """New heads; their draft vocabulary is what `responses` say most often."""
    model = EarlyExitModel.from_configs(base, recipe.heads.configs(recipe.heads.counts()))
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
    return Engine(
        model, tokenizer, method="autoregressive", max_num_seqs=data.batch_size, max_prefill_tokens=PREFILL_TOKENS
    )


def render(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The token ids of each prompt as the base reads it; ValueError names a bad prompt."""
    rendered = []
    for prompt in prompts:
        try:
            rendered.append(encode_prompt(engine, prompt))
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
    for text in (prompt.text for prompt in prompts if prompt.text):
        digest.update(json.dumps(engine.encode(text)).encode())
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
