"""The plan: what a run would do, what of it is done already, and what the rest costs on this machine."""

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints import fingerprint, load_training_state
from ..heads import EarlyExitModel
from ..infer import Engine, SamplingParams
from ..recipes import Recipe
from .cache import StateSource, bytes_per_token, cached_layers, wanted_columns
from .cache_writer import check_sequences, extend_cache, num_fitting, open_index
from .data_stage import check_template, load_prompts, open_data, prompt_settings, sample_sequences
from .online import OnlineStates, check_states
from .pipeline import (
    check_settings,
    check_split,
    make_engine,
    make_model,
    open_sequences,
    order_responses,
    render,
    resolve,
    response_settings,
    training_settings,
)
from .prompts import Prompt, is_held_out
from .responses import Response, read_beginning, read_responses
from .sequences import read_made
from .split import split_sequences
from .trainer import Trainer

NUM_PROBED = 16
"""Prompts that the probe reads."""
NUM_SAMPLED = 64
"""Rows of a data set from which the length of its sequences is told."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What this machine does in a second, measured on a few prompts."""

    responses: float
    """Response tokens regenerated."""
    cached: float
    """Tokens, of prompts and responses, read into the cache."""
    trained: float
    """Response tokens trained on, by all heads."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a run finds in its folder."""

    num_responses: int
    """Responses."""
    num_response_tokens: int
    """Their tokens."""
    num_cached: int
    """Tokens for which the cache has everything that is wanted."""
    num_steps: int
    """Training steps to go on from."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Mean tokens of a sequence, as far as it is known before."""

    prompt: float
    """Only read."""
    response: float
    """Trained on."""


def describe_plan(
    recipe: Recipe,
    base: PreTrainedModel,
    tokenizer: Any,
    *,
    cache_layers: Sequence[int] = (),  # as in `make_adapter`
    resume: bool = True,
) -> str:
    """The plan of a run as text; takes a few seconds of measuring and writes nothing that stays.

    Raises the ValueError with which the run would end, as far as it can be known before.
    """
    recipe = resolve(recipe, base)
    check_states(recipe, cache_layers)
    assert recipe.heads.exit_layers is not None
    folder, seed = recipe.output_folder(), recipe.training.seed
    data = open_data(recipe.data, folder)
    check_template(data, tokenizer)
    engine = make_engine(base, tokenizer, recipe.data)
    layers = sorted({*recipe.heads.exit_layers, *cache_layers})
    model = make_model(base, recipe, [])
    prompts: list[Prompt] | None = None
    if data.is_trained_on:
        maker, _ = open_sequences(folder, base, tokenizer, data, seed=seed)
        samples = sample_sequences(data, maker, NUM_SAMPLED)
        num_answer_tokens = sum(sample.num_answer_tokens for sample in samples)
        per_response = Shape(
            prompt=(sum(sample.length for sample in samples) - num_answer_tokens) / len(samples),
            response=num_answer_tokens / len(samples),
        )
        rendered = [[*sample.prompt_token_ids, *sample.token_ids] for sample in samples]
        described = f"data       {data.describe()}"
    else:
        check_settings(folder / "data.json", prompt_settings(data))
        prompts = load_prompts(folder, data, engine, write=False)
        check_split(prompts, recipe.data.held_out_fraction)
        rendered = render(engine, prompts)
        per_response = Shape(prompt=sum(map(len, rendered)) / len(rendered), response=0.6 * recipe.data.max_new_tokens)
        described = _describe_data(recipe, prompts)
    done = find_done(recipe, model, engine, prompts, layers, resume=resume)
    rates = probe(recipe, base, engine, rendered, layers, answer=not data.is_trained_on)
    lines = [
        _describe_base(recipe, base, model),
        *_describe_heads(model),
        described,
        *_describe_stages(recipe, model, rates, done, layers, per_response),
    ]
    return "\n".join(lines)


def find_done(
    recipe: Recipe,
    model: EarlyExitModel,
    engine: Engine,
    prompts: Sequence[Prompt] | None,  # None where the data's own responses are trained on
    layers: Sequence[int],
    *,
    resume: bool,
) -> Done:
    """Look at the run's folder without writing; raises ValueError for what does not fit the recipe."""
    folder, data, seed = recipe.output_folder(), recipe.data, recipe.training.seed
    made = [response.num_answer_tokens for response in read_responses(folder / "responses.jsonl")]
    if prompts is None:
        responses, is_whole = read_made(folder, data.num_tokens)
    else:
        check_settings(folder / "responses.json", response_settings(engine, prompts, data, seed=seed))
        order = order_responses(prompts, data, seed=seed)
        responses = read_beginning(folder / "responses.jsonl", order, data.num_tokens)
        is_whole = len(made) == len(order)
    num_tokens = sum(response.num_answer_tokens for response in responses)
    is_online = data.states == "online"
    index = {"num_rows": {}} if is_online else open_index(folder / "cache", model.backbone, fingerprint(model.base))
    if responses and not is_online:
        all_layers = {*cached_layers(index["num_rows"]), *layers}
        responses = responses[: num_fitting(responses, sorted(all_layers), model.backbone, data.max_cache_gb)]
        check_sequences(folder / "cache", responses)
    num_training = None
    if num_tokens >= data.num_tokens or is_whole:
        num_training = len(split_sequences(responses, data.held_out_fraction)[0])
    state = None
    if resume and any(True for _ in model.heads.parameters()):
        state = load_training_state(folder / "checkpoints", training_settings(recipe, num_training))
    return Done(
        num_responses=len(made),
        num_response_tokens=sum(made),
        num_cached=min(index["num_rows"].get(name, 0) for name in wanted_columns(layers)),
        num_steps=0 if state is None else state.step,
    )


def probe(
    recipe: Recipe,
    base: PreTrainedModel,
    engine: Engine,
    rendered: Sequence[list[int]],
    layers: Sequence[int],
    *,
    answer: bool,  # whether the base makes the responses
) -> Rates:
    """Run each stage on a few prompts and take the time."""
    per_token = _probe_responses(engine, rendered[: recipe.data.batch_size]) if answer else 0.0
    # What follows needs no real responses, only rows: the later part of a prompt stands for one.
    samples = [
        Response(
            prompt_id=str(number),
            kind="",
            sample=0,
            prompt_token_ids=token_ids[: max(1, len(token_ids) // 4)],
            token_ids=token_ids[max(1, len(token_ids) // 4) :],
        )
        for number, token_ids in enumerate(rendered[:NUM_PROBED])
        if len(token_ids) > 1
    ]
    num_rows = sum(sample.length for sample in samples)
    with tempfile.TemporaryDirectory() as folder:
        backbone = EarlyExitModel.from_configs(base, []).backbone
        start = time.perf_counter()
        states: StateSource = extend_cache(
            Path(folder) / "cache",
            samples,
            backbone,
            layers,
            fingerprint=fingerprint(base),
            show_progress=False,
        )
        cached = num_rows / (time.perf_counter() - start)
        if recipe.data.states == "online":
            states = OnlineStates(samples)
        trained = _probe_training(recipe, base, states, Path(folder))
    return Rates(responses=1 / per_token if answer else float("inf"), cached=cached, trained=trained)


def _probe_responses(engine: Engine, rendered: Sequence[list[int]]) -> float:
    """Seconds a token."""
    for token_ids in rendered:
        engine.add_request(token_ids, SamplingParams(max_new_tokens=8, ignore_eos=True))
    seconds = []
    while engine.has_unfinished:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    # The steps that read prompts in are the slowest; a response has far more of the others.
    return sorted(seconds)[len(seconds) // 4] / len(rendered)


def _probe_training(recipe: Recipe, base: PreTrainedModel, cache: StateSource, folder: Path) -> float:
    model = make_model(base, recipe, cache.sequences)
    if not any(True for _ in model.heads.parameters()):
        return float("inf")
    everything = list(range(len(cache.sequences)))
    num_tokens = sum(sequence.num_answer_tokens for sequence in cache.sequences)
    settings = replace(recipe.training, batch_tokens=num_tokens, num_epochs=2, max_steps=2)
    trainer = Trainer(model, cache, everything, everything, folder, **asdict(settings))
    trainer.step()
    start = time.perf_counter()
    trainer.step()
    return num_tokens / (time.perf_counter() - start)


def _describe_base(recipe: Recipe, base: PreTrainedModel, model: EarlyExitModel) -> str:
    size = sum(parameter.numel() for parameter in base.parameters())
    return (
        f"base       {recipe.model.source}: {model.backbone.num_layers} layers, "
        f"{size / 1e6:.1f}M parameters, {str(base.dtype).removeprefix('torch.')} on {base.device}"
    )


def _describe_heads(model: EarlyExitModel) -> list[str]:
    lines = []
    for head in model.exit_heads:
        config = head.config
        size = sum(parameter.numel() for parameter in head.parameters())
        context = " with committed context" if config.committed_context else ""
        vocabulary = config.draft_vocab_size or model.backbone.vocab_size
        lines.append(
            f"head       exit layer {config.exit_layer}: {config.kind}{context}, "
            f"{size / 1e6:.2f}M parameters, scores {vocabulary} of {model.backbone.vocab_size} tokens"
        )
    return lines


def _describe_data(recipe: Recipe, prompts: Sequence[Prompt]) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(p.kind for p in prompts).most_common())
    num_held_out = sum(is_held_out(prompt.id, recipe.data.held_out_fraction) for prompt in prompts)
    return f"data       {recipe.data.prompts}: {len(prompts)} prompts ({kinds}), {num_held_out} held out"


def _describe_stages(
    recipe: Recipe, model: EarlyExitModel, rates: Rates, done: Done, layers: Sequence[int], shape: Shape
) -> list[str]:
    data, training = recipe.data, recipe.training
    mean_prompt, mean_response = shape.prompt, shape.response
    if done.num_responses:
        mean_response = done.num_response_tokens / done.num_responses
    num_rows = int(data.num_tokens * (1 + mean_prompt / mean_response))
    is_online = data.states == "online"
    bytes_per_row = 0 if is_online else bytes_per_token(model.backbone, layers)
    if not is_online:
        num_rows = min(num_rows, int(data.max_cache_gb * 1e9) // bytes_per_row)
    num_trained = int(num_rows * mean_response / (mean_prompt + mean_response) * (1 - data.held_out_fraction))
    num_steps = max(1, training.num_epochs * num_trained // training.batch_tokens)
    num_steps = min(num_steps, training.max_steps or num_steps)
    left = {
        "responses": max(0, data.num_tokens - done.num_response_tokens) / rates.responses,
        "cache": 0.0 if is_online else max(0, num_rows - done.num_cached) / rates.cached,
        "train": max(0, num_steps - done.num_steps) * training.batch_tokens / rates.trained,
    }
    size = sum(parameter.numel() for parameter in model.heads.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.base.parameters())
    disk = num_rows * bytes_per_row + 2 * 12 * size + size * model.backbone.dtype.itemsize
    memory = weights + 16 * size + training.batch_tokens * 64 * model.backbone.hidden_size * len(model.heads)
    made = f"{_time(left['responses'])} at {rates.responses:.0f} tokens/s"
    if rates.responses == float("inf"):
        made = "read from the data"
    return [
        f"responses  at most {data.num_tokens} tokens, {done.num_response_tokens} done: {made}",
        "cache      none: the base reads every batch in training"
        if is_online
        else f"cache      about {num_rows} tokens, {done.num_cached} done: {_time(left['cache'])} "
        f"at {rates.cached:.0f} tokens/s",
        f"train      about {num_steps} steps of {training.batch_tokens} tokens, {done.num_steps} done: "
        f"{_time(left['train'])} at {rates.trained:.0f} tokens/s",
        f"in all     {_time(sum(left.values()))}; {disk / 1e9:.1f} GB of disk in {recipe.output_folder()}, "
        f"about {memory / 1e9:.1f} GB of memory and the KV cache of {data.batch_size} responses",
    ]


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
