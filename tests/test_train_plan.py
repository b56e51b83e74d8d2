"""The plan's arithmetic, and the record of what a run took."""

import json
import time

import pytest
import torch

from hispec.recipes import DataRecipe, load_recipe, override
from hispec.train.estimate import (
    NOTHING,
    Costs,
    Done,
    Probed,
    Sizes,
    estimate_disk,
    estimate_memory,
    estimate_seconds,
    mapped_share,
    plan_work,
)
from hispec.train.pipeline import make_engine, order_responses
from hispec.train.prompts import read_prompts
from hispec.train.responses import read_responses, regenerate
from hispec.train.usage import Usage, UsageFile, describe_usage, metered, show_seconds

from .train_support import build_tokenizer, write_prompts

CPU = torch.device("cpu")
COSTS = Costs(
    prompt_token=0.001,
    decoding_step=0.02,
    response_token=0.002,
    cached_token=0.003,
    trained_token=0.004,
    evaluated_token=0.005,
)


def work_of(*assignments, done=NOTHING, has_weights=True, num_possible=20_000):
    recipe = override(load_recipe("smollm2"), assignments)
    work = plan_work(
        recipe, done, mean_prompt=60, num_possible=num_possible, bytes_per_row=3464, has_weights=has_weights
    )
    return recipe, work


def test_the_amounts_of_a_long_run_follow_from_its_recipe():
    recipe, work = work_of()
    assert work.num_response_tokens == pytest.approx(recipe.data.num_tokens, rel=0.02)
    assert work.num_rows == pytest.approx(2_000_000 * (1 + 60 / work.mean_response), rel=0.01)
    assert work.num_held_out == pytest.approx(0.03 * work.num_rows, rel=0.01)
    trained = 2 * 0.97 * 2_000_000
    assert work.num_steps * work.tokens_per_step == pytest.approx(trained, rel=0.01)
    assert work.num_passes == 1 + -(-work.num_steps // 1000)


def test_what_bounds_a_run_bounds_its_plan():
    assert work_of("training.max_steps=20")[1].num_steps == 20
    assert work_of("data.max_cache_gb=0.1")[1].num_rows == 100_000_000 // 3464
    few = work_of(num_possible=50)[1]
    assert (few.num_responses, few.batch_size) == (50, 50)
    untrained = work_of(has_weights=False)[1]
    assert (untrained.num_steps, untrained.num_passes) == (0, 0)
    assert work_of("heads.kinds=[shared]", "heads.committed_context=false")[1].num_final_passes == 1


def test_seconds_add_up_and_what_is_done_costs_nothing():
    _, work = work_of()
    seconds = estimate_seconds(work, COSTS, NOTHING)
    steps = work.num_response_tokens / 64
    expected = work.num_responses * 60 * 0.001 + steps * (0.02 + 64 * 0.002)
    assert seconds["responses"] == pytest.approx(expected, rel=0.05)
    assert seconds["cache"] == work.num_rows * 0.003
    assert seconds["train"] == pytest.approx(
        work.num_steps * work.tokens_per_step * 0.004 + work.num_passes * work.num_held_out * 0.005
    )
    assert seconds["evaluate"] == pytest.approx(9 * work.num_held_out * 0.005)
    half = Done(
        lengths=(work.num_response_tokens // 2,),
        num_cached=0,
        num_steps=work.num_steps // 2,
    )
    left = estimate_seconds(work, COSTS, half)
    assert left["responses"] == pytest.approx(seconds["responses"] / 2, rel=0.01)
    assert left["train"] == pytest.approx(seconds["train"] / 2, rel=0.01)
    whole = Done(
        lengths=(work.num_response_tokens,),
        num_cached=work.num_rows,
        num_steps=work.num_steps,
    )
    left = estimate_seconds(work, COSTS, whole)
    assert (left["responses"], left["cache"], left["train"]) == (0, 0, 0)


@pytest.mark.parametrize(("num_tokens", "batch_size"), [(200, 4), (300, 16), (400, 3)])
def test_the_play_of_responses_is_that_of_regeneration(base, tmp_path, num_tokens, batch_size):
    """Steps and tokens, foretold from the lengths that the responses turn out to have."""
    prompts = read_prompts(write_prompts(tmp_path / "prompts.jsonl", 40))
    data = DataRecipe(max_new_tokens=16, num_tokens=num_tokens, batch_size=batch_size)
    engine = make_engine(base, build_tokenizer(), data)
    order = order_responses(prompts, data, seed=0)
    num_steps, step = 0, engine.step

    def counted():
        nonlocal num_steps
        num_steps += 1
        return step()

    engine.step = counted
    begun, add_request = [], engine.add_request
    engine.add_request = lambda ids, params: begun.append(add_request(ids, params)) or begun[-1]
    regenerate(
        engine,
        order,
        tmp_path / "responses.jsonl",
        num_tokens=num_tokens,
        max_new_tokens=16,
        temperature=0.8,
        max_num_seqs=batch_size,
        seed=0,
    )
    lengths = {
        (response.prompt_id, response.sample): len(response.token_ids)
        for response in read_responses(tmp_path / "responses.jsonl")
    }
    in_order = tuple(lengths[prompt.id, sample] for prompt, sample in order[: len(begun)])
    recipe = override(
        load_recipe("smollm2"),
        [f"data.num_tokens={num_tokens}", f"data.batch_size={batch_size}", "data.max_new_tokens=16"],
    )
    done = Done(lengths=in_order, num_cached=0, num_steps=0)
    work = plan_work(recipe, done, mean_prompt=4, num_possible=len(order), bytes_per_row=1, has_weights=True)
    assert (work.num_responses, work.num_response_tokens) == (len(begun), sum(in_order))
    assert work.num_decoding_steps == num_steps


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_memory_is_that_of_a_batch_and_what_grows_with_the_run(is_on_gpu):
    _, work = work_of()
    sizes = Sizes(
        weights=100,
        packed=50,
        num_parameters=10,
        bytes_per_row=3464,
        bytes_per_kv_token=1000,
        is_on_gpu=is_on_gpu,
        makes_kernels=False,
    )
    peak = Usage(memory=7 * 10**8, device_memory=5 if is_on_gpu else None)
    stages = ("responses", "cache", "train", "evaluate")
    probed = Probed(costs=COSTS, usage=dict.fromkeys(stages, peak), num_kv_tokens=64 * 100, num_rows=4000)
    usage, parts = estimate_memory(work, probed, sizes)
    assert mapped_share(work) == 1
    lists = usage["cache"].memory - peak.memory
    assert 0 < lists < 100 * work.num_rows
    grown_kv = 64 * round(60 + work.mean_response - 100) * 1000
    assert usage["responses"].memory - peak.memory - lists == pytest.approx(0 if is_on_gpu else grown_kv, rel=0.02)
    assert usage["train"].memory - peak.memory - lists == (work.num_rows - 4000) * 3464
    assert parts["train"]["heads, gradients, optimizer"] == 160
    assert {use.device_memory for use in usage.values()} == {peak.device_memory}


def test_disk_counts_cache_checkpoints_and_text():
    recipe, work = work_of()
    sizes = Sizes(
        weights=0,
        packed=0,
        num_parameters=10**6,
        bytes_per_row=3464,
        bytes_per_kv_token=0,
        is_on_gpu=False,
        makes_kernels=False,
    )
    disk = estimate_disk(work, recipe, sizes, 2, [7, 12345])
    text = (work.num_responses * (60 + work.mean_response) + work.num_rows) * 5
    assert disk == pytest.approx(work.num_rows * 3464 + 2 * 12 * 10**6 + 2 * 10**6 + text, rel=0.001)


def test_a_meter_sees_time_and_memory_that_is_gone_again():
    with metered(CPU) as before:
        pass
    with metered(CPU) as usage:
        block = torch.ones(50_000_000)  # 200 MB
        time.sleep(0.1)
        del block
    assert 0.1 <= usage.seconds < 10
    assert usage.memory - before.memory > 150e6
    assert usage.device_memory is None


def test_usage_adds_up_over_processes_and_survives_an_interruption(tmp_path):
    path = tmp_path / "usage.json"

    def interrupted():
        with UsageFile(path, CPU).stage("train"):
            time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    first = UsageFile(path, CPU).read()["train"]
    assert first["seconds"] >= 0.05
    with UsageFile(path, CPU).stage("train"):
        time.sleep(0.05)
    second = UsageFile(path, CPU).read()["train"]
    assert second["seconds"] >= first["seconds"] + 0.05
    assert second["peak_memory"] >= first["peak_memory"] > 0
    with UsageFile(path, CPU).stage("train", anew=True):
        pass
    assert UsageFile(path, CPU).read()["train"]["seconds"] < 0.05
    path.write_text("{")
    assert UsageFile(path, CPU).read() == {}


def test_usage_and_durations_are_told_in_words():
    stages = {
        "responses": {"seconds": 47.2, "peak_memory": 1_400_000_000, "peak_device_memory": None},
        "train": {"seconds": 7300.0, "peak_memory": 1_800_000_000, "peak_device_memory": 3_000_000_000},
    }
    assert describe_usage(json.loads(json.dumps(stages))).splitlines() == [
        "responses  took 47 s; peak 1.40 GB of memory",
        "train      took 2 h 02 min; peak 3.00 GB on the GPU, 1.80 GB of memory",
        "in all     took 2 h 02 min; peak 3.00 GB on the GPU, 1.80 GB of memory",
    ]
    assert [show_seconds(seconds) for seconds in (0.2, 119, 121, 3599, 3660)] == [
        "0 s",
        "119 s",
        "2 min",
        "1 h 00 min",
        "1 h 01 min",
    ]
