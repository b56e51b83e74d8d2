"""CUDA graphs without CUDA: a recording that repeats its operations on the very tensors that they were recorded with.

What a pass would take from the host anew, a number, a shape, a tensor made for it, is then the old one, as on a GPU.
"""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hispec.infer import Engine, cuda_graph
from hispec.infer.varlen_attention import varlen_layout, varlen_numbers, varlen_shape

from .host_watch import HostIsTouchedError, host_is_untouched
from .models import build_base, build_heads, reference, shallow
from .paged_kernel import stand_in
from .test_batching import fill_with_nan_what_is_free
from .test_drafter import FREE, PROMPTS, SAMPLINGS, params_of

# What they compute is no operation of torch, and a GPU has none of them.
pytestmark = pytest.mark.usefixtures("without_kernels")


class Recorder(TorchDispatchMode):
    """Remembers each operation with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Recordings:
    """Stands in for `record`; knows what was recorded and how often it was replayed."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []
        self.refuses = lambda number: False

    def record(self, run, pool):
        number = len(self.num_replays)
        self.num_replays.append(0)
        if self.refuses(number):
            raise RuntimeError("operation not permitted when stream is capturing")
        run()
        recorder = Recorder()
        try:
            with host_is_untouched(), recorder:
                output = run()
        except HostIsTouchedError as error:
            raise RuntimeError(f"operation not permitted when stream is capturing: {error}") from error

        def replay():
            self.num_replays[number] += 1
            for func, args, kwargs, old in recorder.calls:
                inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
                for result, again in zip(tree_leaves(old), tree_leaves(func(*args, **kwargs)), strict=True):
                    if torch.is_tensor(result) and result.untyped_storage().data_ptr() not in inputs:
                        result.copy_(again)

        # A recording computes nothing.
        for tensor in [] if output is None else [output]:
            tensor.fill_(math.nan)
        return replay, output


@pytest.fixture
def recordings(monkeypatch) -> Recordings:
    """Engines that are built now believe in a GPU with a paged kernel."""
    recordings = Recordings()
    monkeypatch.setattr(cuda_graph, "record", recordings.record)
    monkeypatch.setattr(cuda_graph, "new_pool", lambda: None)
    monkeypatch.setattr("hispec.infer.engine.can_use_varlen", lambda kv_cache, num_heads: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    # A packed weight is a tensor that this recording cannot look into, and no GPU has one.
    monkeypatch.setattr("hispec.infer.engine.should_pack", lambda config, model: False)
    return recordings


def run(engine, params, prompts=PROMPTS):
    """Texts, whose choice each token was, and all counts: drafts that differ show here though the texts do not."""
    engine._hierarchy._generator.manual_seed(7)
    fill_with_nan_what_is_free(engine)
    completions = engine.generate(prompts, params)
    counts = {name: vars(level) | {"seconds": 0} for name, level in engine.stats.levels.items()}
    return [(c.token_ids, c.origins) for c in completions], counts


@pytest.fixture(scope="module")
def model():
    return build_heads(shallow(build_base("llama"), 4), "random", (1, 3), committed_context=True, draft_vocab_size=48)


WAYS = {
    "alone": ({"max_num_seqs": 1}, params_of({})),
    "together": ({}, params_of({})),
    "plain": ({"method": "autoregressive"}, params_of({})),
    "single": ({"method": "single-layer", "num_draft_tokens": 4}, params_of(FREE)),
    "preempted": ({"num_blocks": 10, "block_size": 4}, params_of({})),
    "mixed": ({}, [params_of(s, 6 + 2 * i) for i, s in enumerate(list(SAMPLINGS.values())[2:5])]),
    "dynamic": ({"draft_policy": "dynamic", "num_draft_tokens": 4}, params_of({})),
}


@pytest.mark.parametrize("name", WAYS)
def test_graphs_change_no_text_and_no_count(model, recordings, caplog, name):
    options, params = WAYS[name]
    options = {"num_blocks": 60} | options
    with_graphs = Engine(model, **options)
    without = Engine(model, cuda_graphs=False, **options)
    assert run(with_graphs, params) == run(without, params)
    assert sum(recordings.num_replays) > 3 * len(recordings.num_replays)
    assert not caplog.text


def test_texts_are_those_of_the_base_and_shapes_are_few(model, recordings):
    engine = Engine(model, num_blocks=60)
    texts, _ = run(engine, params_of({}, 25))
    assert [text for text, _ in texts] == [reference(model.base, prompt, 25) for prompt in PROMPTS]
    shapes = {shape for _, shape in engine._runner._run._graphs._recorded}
    assert all(size & (size - 1) == 0 for shape in shapes for size in shape)
    assert len(shapes) <= 16


@pytest.mark.parametrize(("architecture", "head"), [("qwen2-window", "block"), ("opt", "mlp"), ("gpt2", "norm")])
def test_architectures(recordings, architecture, head):
    model = build_heads(shallow(build_base(architecture), 4), "random", (0, 2), head=head, committed_context=True)
    found = [run(Engine(model, num_blocks=40, cuda_graphs=on), params_of({})) for on in (None, False)]
    assert found[0] == found[1]
    assert sum(recordings.num_replays)


@pytest.mark.parametrize("refused", [(0,), range(5, 99), range(99)])
def test_what_cannot_be_recorded_runs_without(model, recordings, caplog, refused):
    recordings.refuses = lambda number: number in refused
    found = run(Engine(model, num_blocks=60), params_of({}))
    assert found == run(Engine(model, num_blocks=60, cuda_graphs=False), params_of({}))
    assert "cannot be a CUDA graph and runs without" in caplog.text
    assert all(count == 0 for number, count in enumerate(recordings.num_replays) if number in refused)


def test_layers_that_cannot_be_graphs(recordings, caplog):
    """The kernel does not know capped scores; heads without attention are graphs beside such layers."""
    model = build_heads(shallow(build_base("gemma2"), 4), "random", head="norm")
    engine = Engine(model, num_blocks=40)
    assert caplog.text.count("cannot be a CUDA graph") == 4
    texts, _ = run(engine, params_of({}), PROMPTS[:2])
    assert [text for text, _ in texts] == [reference(model.base, prompt, 9) for prompt in PROMPTS[:2]]


def test_tensors_that_move_are_followed(recordings):
    model = build_heads(copy.deepcopy(shallow(build_base("llama"), 4)), "random", committed_context=True)
    engine = Engine(model, num_blocks=60)
    first = run(engine, params_of({}))
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.2
    texts = [completion.token_ids for completion in engine.generate(PROMPTS, params_of({}))]
    assert texts == [reference(model.base, prompt, 9) for prompt in PROMPTS]
    assert texts != [text for text, _ in first[0]]


@pytest.mark.parametrize("options", [{}, {"exact": True}])
def test_without_a_paged_kernel_they_are_refused(model, options):
    with pytest.raises(ValueError, match="cuda_graphs needs torch's paged attention kernel"):
        Engine(model, cuda_graphs=True, num_blocks=8, **options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=9), st.sampled_from([4, 16]))
def test_a_padded_layout_says_the_same_of_what_is_somebodys(shapes, size):
    blocks = itertools.count()
    spans = [([next(blocks) for _ in range(9)], start, start + number) for start, number in shapes]
    shape = varlen_shape(spans, size)
    layouts = [
        varlen_layout(torch.tensor(varlen_numbers(spans, size, each, 1000)), size, each)
        for each in (shape, shape.padded())
    ]
    exact, padded = layouts
    num_rows, num_seqs = sum(number for _, number in shapes), len(spans)
    assert torch.equal(padded.slots[:num_rows], exact.slots[:num_rows])
    assert (padded.slots[num_rows:] == 1000).all()
    assert torch.equal(padded.first_rows[: num_seqs + 1], exact.first_rows[: num_seqs + 1])
    assert (padded.first_rows[num_seqs:] == num_rows).all()
    assert torch.equal(padded.num_keys[:num_seqs], exact.num_keys[:num_seqs])
    assert (padded.num_keys[num_seqs:] == 0).all()
    width = exact.block_tables.shape[1]
    assert torch.equal(padded.block_tables[:num_seqs, :width], exact.block_tables[:num_seqs])
    assert padded.max_queries >= exact.max_queries
    assert padded.max_queries > 1 or len(padded.slots) == len(padded.num_keys)
