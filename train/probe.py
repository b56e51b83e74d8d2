"""The probe: every stage of a run on as much data as one batch of it takes, for its time and its memory."""

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints import fingerprint
from ..heads import EarlyExitModel
from ..infer import Engine, SamplingParams
from ..recipes import Recipe
from .cache import StateSource
from .cache_writer import BATCH_TOKENS, extend_cache
from .estimate import Costs, Probed
from .evaluate import evaluate
from .heap import give_back
from .online import OnlineStates
from .pipeline import PREFILL_TOKENS, make_engine, make_model
from .responses import Response
from .trainer import Trainer
from .usage import metered

NUM_STEPS = 6
"""Decoding steps that are timed; training steps are fewer, the first is not counted."""


def probe(
    recipe: Recipe,  # resolved
    base: PreTrainedModel,
    tokenizer: Any,
    rendered: Sequence[list[int]],
    layers: Sequence[int],
    *,
    makes_responses: bool,  # False where they are read from the data
    mean_response: float,
    num_rows: int,  # that the run will cache
    num_held_out: int,  # of these
) -> Probed:
    """Run the stages one after the other, as a run does; takes some seconds and writes nothing that stays.

    Responses are stood in for by the tokens of prompts: only their lengths matter.
    """
    device = base.device
    usage = {}
    with metered(device) as usage["responses"]:
        prompt_token, decoding_step, response_token, num_kv_tokens = (
            _probe_responses(recipe, base, tokenizer, rendered, mean_response) if makes_responses else (0, 0, 0, 0)
        )
    # What the engine held is gone before the next stage begins, as in a run.
    gc.collect()
    give_back()
    samples = _stand_ins(recipe, rendered, round(mean_response), num_rows)
    with tempfile.TemporaryDirectory() as folder:
        backbone, print_of_base = EarlyExitModel.from_configs(base, []).backbone, fingerprint(base)
        states: StateSource = OnlineStates(samples)
        with metered(device) as usage["cache"]:
            if recipe.data.states == "cached":
                states = extend_cache(
                    Path(folder) / "cache", samples, backbone, layers, fingerprint=print_of_base, show_progress=False
                )
        with metered(device) as usage["train"]:
            trained_token, model = _probe_training(recipe, base, states, Path(folder))
        chosen = _first(samples, lambda sample: sample.length, min(BATCH_TOKENS, num_held_out))
        model.heads.to(base.dtype)
        with metered(device) as usage["evaluate"]:
            evaluate(model, states, chosen, max_window=recipe.training.max_window, distances=())
    num_cached = sum(sample.length for sample in samples)
    num_evaluated = sum(samples[index].length for index in chosen)
    costs = Costs(
        prompt_token=prompt_token,
        decoding_step=decoding_step,
        response_token=response_token,
        cached_token=usage["cache"].seconds / num_cached if recipe.data.states == "cached" else 0.0,
        trained_token=trained_token,
        evaluated_token=usage["evaluate"].seconds / num_evaluated,
    )
    # Evaluations come between training steps too, with the optimizer beside them.
    usage["train"].memory = max(usage["train"].memory, usage["evaluate"].memory)
    return Probed(costs=costs, usage=usage, num_kv_tokens=num_kv_tokens, num_rows=num_cached)


def _probe_responses(
    recipe: Recipe, base: PreTrainedModel, tokenizer: Any, rendered: Sequence[list[int]], mean_response: float
) -> tuple[float, float, float, int]:
    """Seconds a prompt token, a step, and a response in it; tokens whose keys and values are kept at once."""
    engine, data = make_engine(base, tokenizer, recipe.data), recipe.data
    # Halfway through their responses; those of every second kind are sampled.
    room = engine.model.backbone.max_context - 2 * NUM_STEPS
    contexts = [
        _lengthened(rendered, place, min(room, len(rendered[place % len(rendered)]) + round(mean_response / 2)))
        for place in range(min(data.batch_size, len(rendered) * (data.greedy + data.num_sampled)))
    ]
    num_reading = math.ceil(sum(map(len, contexts)) / PREFILL_TOKENS)
    full = _time_steps(engine, recipe, contexts, num_reading)
    prompt_token = engine.stats.prefill_seconds / engine.stats.num_prompt_tokens
    alone = min(full, _time_steps(engine, recipe, contexts[:1], 1)) if len(contexts) > 1 else 0.0
    response_token = (full - alone) / max(1, len(contexts) - 1)
    return prompt_token, full - response_token * len(contexts), response_token, sum(map(len, contexts))


def _time_steps(engine: Engine, recipe: Recipe, contexts: Sequence[list[int]], num_reading: int) -> float:
    """Seconds of a step in which all contexts get one more token."""
    data = recipe.data
    for place, context in enumerate(contexts):
        is_greedy = data.greedy and place % (1 + data.num_sampled) == 0
        engine.add_request(
            context,
            SamplingParams(
                max_new_tokens=min(num_reading + NUM_STEPS, engine.model.backbone.max_context - len(context)),
                temperature=0.0 if is_greedy else data.temperature,
                seed=None if is_greedy else place,
                ignore_eos=True,
            ),
        )
    seconds = []
    while engine.has_unfinished:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    # All are read in then, and none is finished.
    return statistics.median(seconds[num_reading : num_reading + NUM_STEPS - 1] or seconds[-1:])


def _probe_training(
    recipe: Recipe, base: PreTrainedModel, cache: StateSource, folder: Path
) -> tuple[float, EarlyExitModel]:
    """Seconds a response token, and the model whose heads were trained a little."""
    model = make_model(base, recipe, cache.sequences)
    if not any(True for _ in model.heads.parameters()):
        return 0.0, model
    everything = list(range(len(cache.sequences)))
    num_tokens = sum(len(sequence.token_ids) for sequence in cache.sequences)
    num_epochs = 2 * math.ceil(recipe.training.batch_tokens / num_tokens) + 1
    settings = replace(recipe.training, num_epochs=num_epochs, max_steps=None, trackers=(), deepspeed=None)
    trainer = Trainer(model, cache, everything, everything, folder, **asdict(settings))
    trainer.step()
    give_back()
    start = time.perf_counter()
    trainer.step()
    give_back()
    return (time.perf_counter() - start) / trainer.num_tokens[1], model


def _stand_ins(recipe: Recipe, rendered: Sequence[list[int]], length: int, num_rows: int) -> list[Response]:
    """Responses of the usual length: enough for a batch of the cache and for one of training, but no more than a run
    will have."""
    samples: list[Response] = []
    num_cached = num_tokens = 0
    while not samples or (
        num_cached < num_rows and (num_cached < BATCH_TOKENS or num_tokens < recipe.training.batch_tokens)
    ):
        prompt = rendered[len(samples) % len(rendered)]
        token_ids = _lengthened(rendered, len(samples) + 1, max(2, length))
        samples.append(
            Response(prompt_id=str(len(samples)), kind="", sample=0, prompt_token_ids=list(prompt), token_ids=token_ids)
        )
        num_cached += samples[-1].length
        num_tokens += len(token_ids)
    return samples


def _lengthened(rendered: Sequence[list[int]], place: int, length: int) -> list[int]:
    """`length` tokens of prompts, from that at `place` on."""
    place %= len(rendered)
    tokens = (token_id for prompt in cycle((*rendered[place:], *rendered[:place])) for token_id in prompt)
    return list(islice(tokens, length))


def _first(samples: Sequence[Response], size: Callable[[Response], int], wanted: int) -> list[int]:
    """Places of the first samples that have so much together; at least one."""
    places = [0]
    while len(places) < len(samples) and sum(size(samples[place]) for place in places) < wanted:
        places.append(len(places))
    return places
