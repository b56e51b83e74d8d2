"""Many consumers of one engine."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from hispec.infer import AsyncEngine, Engine, SamplingParams

from .models import build_heads, shallow
from .train_support import build_tokenizer

PROMPTS = [[3, 4, 5], [9], [8, 7, 6, 5, 4, 3, 9, 9, 10, 11, 12], [5, 6], [7, 8, 9, 10]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=240, ignore_eos=True)
"""Not done before it is given up, however slow the machine."""
NUM_BLOCKS = 80


@pytest.fixture(scope="module")
def model(base):
    """Heads that are right about half of the time."""
    return build_heads(shallow(base, 3), "random", committed_context=True)


@pytest.fixture
def engine(model):
    """An engine with room for five."""
    return Engine(model, build_tokenizer(), num_blocks=NUM_BLOCKS)


def run(coroutine):
    """Run to the end, within two minutes."""
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def collect(stream):
    return [delta async for delta in stream]


async def until(condition, what, seconds=60):
    """Wait until the condition holds; AssertionError where it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} seconds still not: {what}"
        await asyncio.sleep(0.01)


def is_clean(engine):
    return not engine.has_unfinished and engine._scheduler._block_manager.num_free == NUM_BLOCKS


def test_consumers_share_rounds_and_get_their_own_text(engine, model, monkeypatch):
    expected = Engine(model, build_tokenizer()).generate(PROMPTS, PARAMS)
    batches, advance_round = [], engine._hierarchy.round

    def watch(sequences):
        batches.append(len(sequences))
        advance_round(sequences)

    monkeypatch.setattr(engine._hierarchy, "round", watch)

    async def serve():
        async with AsyncEngine(engine) as served:
            streams = [collect(served.stream(prompt, PARAMS)) for prompt in PROMPTS[:3]]
            answers = [served.generate(prompt, PARAMS) for prompt in PROMPTS[3:]]
            return await asyncio.gather(*streams, *answers)

    results = run(serve())
    for deltas, completion in zip(results[:3], expected[:3], strict=True):
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [token_id for delta in deltas for token_id in delta.token_ids] == completion.token_ids
        assert deltas[-1].finish_reason == "length"
        assert len(deltas) > 1
    assert [c.token_ids for c in results[3:]] == [c.token_ids for c in expected[3:]]
    assert max(batches) == len(PROMPTS)
    assert is_clean(engine)


def test_a_consumer_that_does_not_read_holds_nobody_up(engine):
    async def serve():
        async with AsyncEngine(engine) as served:
            slow = served.stream(PROMPTS[0], LONG)
            first = await anext(slow)
            # While `slow` is not read at all, others come and go, and its own text goes on growing.
            for prompt in PROMPTS[1:3]:
                assert len((await served.generate(prompt, PARAMS)).token_ids) == 12
            await until(lambda: not engine.has_unfinished, "all requests are finished")
            rest = await collect(slow)
        return sum(len(delta.token_ids) for delta in [first, *rest])

    assert run(serve()) == 60


def test_a_busy_event_loop_does_not_stop_the_engine(engine):
    async def serve():
        async with AsyncEngine(engine) as served:
            stream = served.stream(PROMPTS[0], PARAMS)
            await anext(stream)
            deadline = time.monotonic() + 60
            while engine.has_unfinished and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not engine.has_unfinished
            await stream.aclose()

    run(serve())


def test_who_is_cancelled_or_leaves_gives_up_the_request(engine):
    async def serve():
        async with AsyncEngine(engine) as served:
            other = asyncio.create_task(served.generate(PROMPTS[2], PARAMS))
            waiting = asyncio.create_task(served.generate(PROMPTS[0], ENDLESS))
            streaming = asyncio.create_task(collect(served.stream(PROMPTS[1], ENDLESS)))
            async with aclosing(served.stream(PROMPTS[3], ENDLESS)) as stream:
                async for _ in stream:
                    break
            waiting.cancel()
            streaming.cancel()
            for task in (waiting, streaming):
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: len(engine._unfinished) <= 1, "those who left are forgotten")
            assert len((await other).token_ids) == 12
            await until(lambda: is_clean(engine), "every block is free")
        return engine.stats.num_committed

    # Only the one that stayed was completed.
    assert run(serve()) == 12


def test_an_error_of_the_engine_reaches_all_and_later_requests_are_served(engine, monkeypatch):
    advance_round = engine._hierarchy.round

    def fail(sequences):
        if len(sequences) == 3:
            raise MemoryError("no memory")
        advance_round(sequences)

    async def serve():
        async with AsyncEngine(engine) as served:
            monkeypatch.setattr(engine._hierarchy, "round", fail)
            waiting = [served.generate(prompt, LONG) for prompt in PROMPTS[:2]]
            failed = await asyncio.gather(*waiting, collect(served.stream(PROMPTS[2], LONG)), return_exceptions=True)
            assert is_clean(engine)
            return failed, await served.generate(PROMPTS[0], PARAMS)

    failed, completion = run(serve())
    assert [str(error) for error in failed if isinstance(error, MemoryError)] == ["no memory"] * 3
    assert len(completion.token_ids) == 12


def test_what_cannot_be_served_harms_nobody(engine):
    async def serve():
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(
                served.generate([], PARAMS),
                served.generate(PROMPTS[0], PARAMS),
                collect(served.stream([99], PARAMS)),
                return_exceptions=True,
            )

    empty, completion, outside = run(serve())
    assert "the prompt is empty" in str(empty)
    assert len(completion.token_ids) == 12
    assert "token id outside" in str(outside)


def test_close_ends_what_runs_and_the_thread(engine):
    async def serve():
        served = AsyncEngine(engine)
        await AsyncEngine(engine).close()  # without any request there is no thread to end
        waiting = asyncio.create_task(served.generate(PROMPTS[0], ENDLESS))
        stream = served.stream(PROMPTS[1], ENDLESS)
        await anext(stream)
        thread = served._thread
        await asyncio.gather(served.close(), served.close())
        with pytest.raises(RuntimeError, match="closed before this request had finished"):
            await waiting
        with pytest.raises(RuntimeError, match="closed before this request had finished"):
            await collect(stream)
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            await served.generate(PROMPTS[0])
        return thread

    thread = run(serve())
    assert not thread.is_alive()
    assert is_clean(engine)
    assert thread not in threading.enumerate()


def test_an_event_loop_that_is_gone_takes_its_requests_along(engine, monkeypatch):
    served, loop = AsyncEngine(engine), asyncio.new_event_loop()
    is_gone, advance = threading.Event(), engine.advance
    monkeypatch.setattr(engine, "advance", lambda: is_gone.wait(60) and advance())

    async def submit():
        served._submit(PROMPTS[0], LONG, wants_deltas=True)
        await until(lambda: engine.has_unfinished, "the request has reached the engine")

    loop.run_until_complete(submit())
    loop.close()
    is_gone.set()

    async def serve():
        completion = await served.generate(PROMPTS[1], PARAMS)
        await until(lambda: is_clean(engine), "every block is free")
        await served.close()
        return completion

    assert len(run(serve()).token_ids) == 12


def test_an_engine_with_work_of_its_own_is_refused(engine):
    engine.add_request(PROMPTS[0], PARAMS)
    with pytest.raises(ValueError, match="unfinished requests; finish or abort them first"):
        AsyncEngine(engine)


def test_a_stream_needs_a_tokenizer(model):
    async def serve():
        async with AsyncEngine(Engine(model)) as served:
            await anext(served.stream(PROMPTS[0]))

    with pytest.raises(ValueError, match="no tokenizer to stream text with"):
        run(serve())
