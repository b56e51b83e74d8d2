"""The estimate: how much a run does, how long that takes and what it needs. Plain arithmetic."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..recipes import DataRecipe, Recipe
from .evaluate import DISTANCES
from .responses import count_missing
from .usage import Usage

TYPICAL_RESPONSES = (1.0, 0.45, 1.0, 0.2, 1.0, 0.75, 1.0, 0.3, 1.0, 0.6)
"""Lengths of responses as shares of `max_new_tokens`, where none is there to look at; as SmolLM2 answers the packaged
prompts, half of them cut off."""

KERNELS_PER_STEP, MAX_KERNELS = 11e6, 500e6
"""Bytes of the kernels that a CPU library makes and keeps for every new number of rows in 16 bits, measured in training
on one machine; it keeps no more than so many."""

BYTES_PER_LISTED_TOKEN = 72
"""A token id of the responses in Python's own lists, which are held twice."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a run finds in its folder."""

    lengths: tuple[int, ...]
    """Tokens of each response."""
    num_cached: int
    """Tokens for which the cache has everything that is wanted."""
    num_steps: int
    """Training steps to go on from."""

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.lengths)


NOTHING = Done(lengths=(), num_cached=0, num_steps=0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that this machine takes, measured."""

    prompt_token: float
    """To read a token of a prompt before its response is made."""
    decoding_step: float
    """For one token more of each response, beside what every response adds."""
    response_token: float
    """What a response adds to a step."""
    cached_token: float
    """To bring a token, of a prompt or a response, into the cache; 0 without one."""
    trained_token: float
    """To train all heads on a response token; 0 where there is nothing to train."""
    evaluated_token: float
    """To measure all heads on a token once, of a prompt or a response."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What the stages took on a batch each."""

    costs: Costs
    usage: Mapping[str, Usage]
    """By stage, with the peak memory."""
    num_kv_tokens: int
    """Tokens whose keys and values were kept at once."""
    num_rows: int
    """Tokens that were cached."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What takes memory and disk."""

    weights: int
    """Bytes of the base."""
    packed: int
    """Bytes of the packed copy of its weights that the engine keeps."""
    num_parameters: int
    """Of all heads."""
    bytes_per_row: int
    """Disk that a token takes in the cache; 0 without one."""
    bytes_per_kv_token: int
    """Bytes of the keys and values of a token."""
    is_on_gpu: bool
    """Whether the base is; there the pool of keys and values is allocated at once."""
    makes_kernels: bool
    """Whether training multiplies in 16 bits on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much a run does in all, as far as it can be known before."""

    mean_prompt: float
    """Tokens of a rendered prompt."""
    mean_response: float
    """Tokens of a response."""
    num_responses: int
    """Responses made."""
    batch_size: int
    """Of these side by side."""
    num_response_tokens: int
    """Their tokens; some more than are wanted, because all that was begun is finished."""
    num_decoding_steps: int
    """Steps in which they are."""
    num_rows: int
    """Tokens that are trained and measured on, of prompts and responses: what the cache holds."""
    num_held_out: int
    """Of these, tokens that are measured on."""
    num_steps: int
    """Training steps; 0 where there is nothing to train."""
    tokens_per_step: float
    """Response tokens that a step has on average."""
    num_passes: int
    """Measurements of the held-out tokens during training."""
    num_final_passes: int
    """... and at its end, one for each distance."""


def plan_work(
    recipe: Recipe,
    done: Done,
    *,
    mean_prompt: float,
    num_possible: int,  # responses that the prompts allow
    mean_response: float | None = None,  # of the data's own; None where the base makes them
    bytes_per_row: int,  # of the cache; 0 where the base reads every batch anew
    has_weights: bool,  # whether the heads have any
) -> Work:
    """The amounts that follow from a recipe."""
    data, training = recipe.data, recipe.training
    typical = [share * data.max_new_tokens for share in TYPICAL_RESPONSES] if mean_response is None else [mean_response]
    lengths = done.lengths or [max(1, round(length)) for length in typical]
    mean = sum(lengths) / len(lengths)
    if mean_response is None:
        num_responses, num_tokens, num_decoding_steps, batch_size = _play_responses(data, lengths, num_possible)
    else:
        num_responses = max(1, min(num_possible, round(data.num_tokens / mean)))
        num_tokens, num_decoding_steps, batch_size = round(num_responses * mean), 0, 1
    num_kept = min(data.num_tokens + mean / 2, num_possible * mean)
    num_rows = int(num_kept * (1 + mean_prompt / mean))
    if bytes_per_row:
        num_rows = min(num_rows, int(data.max_cache_gb * 1e9) // bytes_per_row)
    num_trained = num_rows * mean / (mean_prompt + mean) * (1 - data.held_out_fraction)
    tokens_per_step = min(num_trained * training.num_epochs, training.batch_tokens + mean / 2)
    num_steps = max(1, round(training.num_epochs * num_trained / tokens_per_step)) if has_weights else 0
    num_steps = min(num_steps, training.max_steps or num_steps)
    num_intervals, rest = divmod(num_steps, training.eval_interval)
    has_context = recipe.heads.committed_context and set(recipe.heads.kinds) != {"shared"}
    return Work(
        mean_prompt=mean_prompt,
        mean_response=mean,
        num_responses=num_responses,
        batch_size=batch_size,
        num_response_tokens=num_tokens,
        num_decoding_steps=num_decoding_steps,
        num_rows=num_rows,
        num_held_out=round(num_rows * data.held_out_fraction),
        num_steps=num_steps,
        tokens_per_step=tokens_per_step,
        num_passes=(1 + num_intervals + (rest > 0)) if num_steps else 0,
        num_final_passes=1 + (len(DISTANCES) if has_context else 0),
    )


def _play_responses(data: DataRecipe, lengths: Sequence[int], num_possible: int) -> tuple[int, int, int, int]:
    """Responses made, their tokens, the steps they take and the most that run at once, when regeneration begins them as
    it does and their lengths are `lengths`, over and over."""
    ends: list[tuple[int, int]] = []  # of those that run: the step after which each ends, and its length
    num_begun = num_finished = num_tokens = step = most = 0
    while True:
        missing = count_missing(num_finished, num_tokens, len(ends), data.num_tokens, data.max_new_tokens)
        num_new = max(0, min(missing, data.batch_size - len(ends), num_possible - num_begun))
        for place in range(num_begun, num_begun + num_new):
            length = lengths[place % len(lengths)]
            heapq.heappush(ends, (step + length, length))
        num_begun += num_new
        most = max(most, len(ends))
        if not ends:
            return num_finished, num_tokens, step, most
        step = ends[0][0]
        while ends and ends[0][0] == step:
            num_tokens += heapq.heappop(ends)[1]
            num_finished += 1


def estimate_seconds(work: Work, costs: Costs, done: Done) -> dict[str, float]:
    """By stage, the seconds of what is not done yet."""
    left = 1 - min(1.0, done.num_response_tokens / work.num_response_tokens)
    responses = (
        work.num_responses * work.mean_prompt * costs.prompt_token
        + work.num_decoding_steps * costs.decoding_step
        + work.num_response_tokens * costs.response_token
    )
    steps_left = max(0, work.num_steps - done.num_steps)
    passes_left = work.num_passes * (steps_left / work.num_steps) if work.num_steps else 0
    return {
        "responses": left * responses,
        "cache": max(0, work.num_rows - done.num_cached) * costs.cached_token,
        "train": steps_left * work.tokens_per_step * costs.trained_token
        + passes_left * work.num_held_out * costs.evaluated_token,
        "evaluate": work.num_final_passes * work.num_held_out * costs.evaluated_token,
    }


def estimate_memory(work: Work, probed: Probed, sizes: Sizes) -> tuple[dict[str, Usage], dict[str, dict[str, int]]]:
    """By stage, the most memory of a whole run, and what is known of its parts, in bytes.

    To the peaks of single batches comes what grows with a run: keys and values of whole responses, the responses as
    lists, and the rows of the cache that are mapped into memory.
    """
    kv = sizes.bytes_per_kv_token * round(work.batch_size * (work.mean_prompt + work.mean_response))
    lists = BYTES_PER_LISTED_TOKEN * work.num_rows
    mapped = round(mapped_share(work) * work.num_rows * sizes.bytes_per_row)
    more_mapped = max(0, mapped - sizes.bytes_per_row * probed.num_rows)
    kernels = round(min(MAX_KERNELS, KERNELS_PER_STEP * work.num_steps)) if sizes.makes_kernels else 0
    grown = {
        "responses": lists + (0 if sizes.is_on_gpu else max(0, kv - sizes.bytes_per_kv_token * probed.num_kv_tokens)),
        "cache": lists,
        "train": lists + more_mapped + kernels,
        "evaluate": lists + more_mapped + kernels,
    }
    # In float32: the weights, their gradients and the two moments of AdamW.
    heads = 16 * sizes.num_parameters
    parts = {
        "responses": {"weights": sizes.weights, "packed": sizes.packed, "keys and values": kv},
        "cache": {"weights": sizes.weights},
        "train": {
            "weights": sizes.weights,
            "heads, gradients, optimizer": heads,
            "cache, mapped": mapped,
            "kernels": kernels,
        },
        "evaluate": {"weights": sizes.weights, "cache, mapped": mapped, "kernels": kernels},
    }
    usage = {
        stage: Usage(memory=probed.usage[stage].memory + more, device_memory=probed.usage[stage].device_memory)
        for stage, more in grown.items()
    }
    return usage, parts


def estimate_disk(
    work: Work,
    recipe: Recipe,
    sizes: Sizes,
    parameter_size: int,  # bytes, in the adapter
    token_ids: Sequence[int],  # such as the responses have, written as text
) -> int:
    """Bytes of the run's folder when it is done: responses twice as text, cache, checkpoints, adapter."""
    text = sum(len(f"{token_id}, ") for token_id in token_ids) / len(token_ids)
    made = work.num_responses * (work.mean_prompt + work.mean_response)
    # The last two checkpoints are kept, with three float32 numbers a parameter.
    num_saved = min(2, -(-work.num_steps // recipe.training.checkpoint_interval))
    heads = sizes.num_parameters * (12 * num_saved + parameter_size)
    return round((made + work.num_rows) * text) + work.num_rows * sizes.bytes_per_row + heads


def mapped_share(work: Work) -> float:
    """The share of the cache's rows that training and evaluation read, 0 to 1."""
    num_trained = work.num_rows - work.num_held_out
    num_read = work.num_steps * work.tokens_per_step * (1 + work.mean_prompt / work.mean_response)
    return (work.num_held_out + min(num_trained, num_read)) / max(1, work.num_rows)
