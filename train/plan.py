"""The plan: what a run would do, what of it is done already, and what the rest costs on this machine."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints import fingerprint, load_training_state
from ..heads import EarlyExitModel
from ..heads.product import can_pack
from ..infer import Engine
from ..recipes import Recipe
from .cache import bytes_per_token, cached_layers, wanted_columns
from .cache_writer import check_sequences, free_disk, num_fitting, open_index
from .data_stage import Data, check_template, load_prompts, open_data, prompt_settings, sample_sequences
from .estimate import NOTHING, Done, Probed, Sizes, Work, estimate_disk, estimate_memory, estimate_seconds, plan_work
from .online import check_states
from .pipeline import (
    check_adapter_folder,
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
from .probe import probe
from .prompts import Prompt, is_held_out
from .responses import read_beginning, read_responses
from .sequences import read_made
from .split import split_sequences
from .usage import show_memory, show_seconds

NUM_SAMPLED = 64
"""Rows of a data set from which the length of its sequences is told."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is seen of the data before a run."""

    prompts: list[Prompt] | None
    """What the base is asked; None where the data's own responses are trained on."""
    rendered: list[list[int]]
    """Token ids that are only read, of each prompt or of some sequences."""
    mean_response: float | None
    """Answer tokens of a sequence; None where the base makes them."""
    num_possible: int
    """Responses that there can be at most."""


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
    folder = recipe.output_folder()
    check_adapter_folder(folder, base)
    data = open_data(recipe.data, folder)
    check_template(data, tokenizer)
    engine = make_engine(base, tokenizer, recipe.data)
    look = _look_at(folder, data, engine, seed=recipe.training.seed)
    layers = sorted({*recipe.heads.counts(), *cache_layers})
    model = make_model(base, recipe, [])
    done = find_done(recipe, model, engine, look.prompts, layers, resume=resume)
    # Before the probe, which must find as much memory as a run does.
    lines = [_describe_base(recipe, base, model), *_describe_heads(model), _describe_data(data, look.prompts)]
    bytes_per_row = 0 if recipe.data.states == "online" else bytes_per_token(model.backbone, layers)
    sizes = _measure_sizes(model, bytes_per_row, is_packed=engine.model.is_packed)
    if data.is_trained_on:
        sizes = replace(sizes, packed=0, bytes_per_kv_token=0)
    del engine, model
    gc.collect()
    work = plan_work(
        recipe,
        done,
        mean_prompt=sum(map(len, look.rendered)) / len(look.rendered),
        mean_response=look.mean_response,
        num_possible=look.num_possible,
        bytes_per_row=sizes.bytes_per_row,
        has_weights=sizes.num_parameters > 0,
    )
    probed = probe(
        recipe,
        base,
        tokenizer,
        look.rendered,
        layers,
        makes_responses=not data.is_trained_on,
        mean_response=work.mean_response,
        num_rows=work.num_rows,
        num_held_out=work.num_held_out,
    )
    lines += _describe_stages(recipe, work, done, probed, sizes)
    some_ids = [token_id for prompt in look.rendered[:100] for token_id in prompt]
    disk = estimate_disk(work, recipe, sizes, base.dtype.itemsize, some_ids)
    free = free_disk(folder)
    enough = "" if disk <= free else ", which is not enough"
    lines.append(f"disk       {disk / 1e9:.2f} GB in {folder}, where {free / 1e9:.1f} GB are free{enough}")
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
    training = None
    if num_tokens >= data.num_tokens or is_whole:
        training = [responses[index] for index in split_sequences(responses, data.held_out_fraction)[0]]
    state = None
    if resume and any(True for _ in model.heads.parameters()):
        state = load_training_state(folder / "checkpoints", training_settings(recipe, model.base, training))
    return Done(
        lengths=tuple(made),
        num_cached=min(index["num_rows"].get(name, 0) for name in wanted_columns(layers)),
        num_steps=0 if state is None else state.step,
    )


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


def _look_at(folder: Path, data: Data, engine: Engine, *, seed: int) -> Look:
    recipe, tokenizer = data.recipe, engine.tokenizer
    if not data.is_trained_on:
        check_settings(folder / "data.json", prompt_settings(data))
        prompts = load_prompts(folder, data, engine, write=False)
        check_split(prompts, recipe.held_out_fraction)
        num_possible = len(prompts) * (recipe.greedy + recipe.num_sampled)
        return Look(prompts=prompts, rendered=render(engine, prompts), mean_response=None, num_possible=num_possible)
    maker, _ = open_sequences(folder, engine.model.base, tokenizer, data, seed=seed)
    samples, is_whole = sample_sequences(data, maker, NUM_SAMPLED)
    made, is_made = read_made(folder, recipe.num_tokens)
    # How many a longer set holds is not known; as many as are wanted, if they were of one token each.
    num_possible = len(made) if is_made else len(samples) if is_whole else recipe.num_tokens
    return Look(
        prompts=None,
        rendered=[sample.read_ids for sample in samples],
        mean_response=sum(sample.num_answer_tokens for sample in samples) / len(samples),
        num_possible=num_possible,
    )


def _describe_data(data: Data, prompts: Sequence[Prompt] | None) -> str:
    recipe = data.recipe
    if prompts is None:
        return f"data       {data.describe()}"
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(p.kind for p in prompts).most_common())
    num_held_out = sum(is_held_out(prompt.id, recipe.held_out_fraction) for prompt in prompts)
    return f"data       {recipe.prompts}: {len(prompts)} prompts ({kinds}), {num_held_out} held out"


def _measure_sizes(
    model: EarlyExitModel,
    bytes_per_row: int,  # of the cache
    *,
    is_packed: bool,  # whether the engine asked for packed copies
) -> Sizes:
    backbone, embeddings = model.backbone, model.base.get_input_embeddings().weight
    num_base = sum(parameter.numel() for parameter in model.base.parameters())
    # Packed is what is multiplied; embeddings are looked up, unless they are the LM head too.
    num_packed = num_base if embeddings is backbone.lm_head.weight else num_base - embeddings.numel()
    is_on_gpu = backbone.device.type == "cuda"
    num_kv = 2 * backbone.num_layers * backbone.num_kv_heads * backbone.head_dim
    return Sizes(
        weights=num_base * backbone.dtype.itemsize,
        packed=num_packed * backbone.dtype.itemsize * (is_packed and not is_on_gpu and can_pack(backbone.dtype)),
        num_parameters=sum(parameter.numel() for parameter in model.heads.parameters()),
        bytes_per_row=bytes_per_row,
        bytes_per_kv_token=num_kv * backbone.dtype.itemsize,
        is_on_gpu=is_on_gpu,
        makes_kernels=not is_on_gpu and backbone.dtype.itemsize == 2,
    )


def _describe_stages(recipe: Recipe, work: Work, done: Done, probed: Probed, sizes: Sizes) -> list[str]:
    """A line a stage: how much, how long, and how much memory it takes at most, with what fills it."""
    seconds = estimate_seconds(work, probed.costs, done)
    usage, parts = estimate_memory(work, probed, sizes)
    if sizes.num_parameters:
        train = f"about {work.num_steps} steps of {work.tokens_per_step:.0f} tokens, {done.num_steps} done"
    else:
        train = "nothing, the heads have no weights"
    amounts = {
        "responses": f"{recipe.data.num_tokens} tokens, {done.num_response_tokens} done",
        "cache": f"about {work.num_rows} tokens, {done.num_cached} done"
        if sizes.bytes_per_row
        else "none, the base reads every batch in training",
        "train": train,
        "evaluate": f"about {work.num_held_out} tokens, {work.num_final_passes} times",
    }
    costs = probed.costs
    rates = {}
    if whole := estimate_seconds(work, costs, NOTHING)["responses"]:
        rates["responses"] = work.num_response_tokens / whole
    else:
        amounts["responses"] = f"read from the data, at most {amounts['responses']}"
    if costs.cached_token:
        rates["cache"] = 1 / costs.cached_token
    if costs.trained_token:
        rates["train"] = 1 / costs.trained_token
    lines = []
    for stage, amount in amounts.items():
        time = show_seconds(seconds[stage]) + (f" at {rates[stage]:.0f} tokens/s" if stage in rates else "")
        memory = show_memory(usage[stage].memory, usage[stage].device_memory)
        filled = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in parts[stage].items() if value > 5e6)
        lines.append(f"{stage:<10} {amount}: {time}; {memory}" + (filled and f" ({filled})"))
    on_device = [use.device_memory for use in usage.values() if use.device_memory is not None]
    highest = show_memory(max(use.memory for use in usage.values()), max(on_device, default=None))
    return [*lines, f"in all     {show_seconds(sum(seconds.values()))} beside loading; {highest}"]
