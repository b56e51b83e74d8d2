"""A draft of several tokens: drawn on the device, nothing read or sent until it is whole."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from hispec.infer import Engine, SamplingParams
from hispec.infer.drafter import Drafter
from hispec.infer.model_runner import ModelRunner

from .host_watch import HostIsTouchedError, host_is_untouched
from .models import build_base, build_heads, shallow

# A GPU has none of them.
pytestmark = pytest.mark.usefixtures("without_kernels")

PROMPTS = [[9], [8, 7, 6, 5, 4, 3, 9, 9, 10, 11, 12], list(range(3, 23))]
FREE = {"temperature": 1.0}
SAMPLINGS = {
    "greedy": {},
    "rejection": FREE,
    "filtered": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "coupled": FREE | {"seed": 3},
    "coupled, filtered": {"temperature": 0.8, "seed": 3, "top_k": 9},
    "biased": FREE | {"logit_bias": {5: 1.0}, "banned_token_ids": (4,), "min_new_tokens": 9, "stop_token_ids": (7, 9)},
}
PENALISED = {"presence_penalty": 0.5}


@pytest.fixture(scope="module")
def model():
    """Drafts are right now and then; the first head drafts from embeddings."""
    base = shallow(build_base("llama"), 4)
    return build_heads(base, "random", (0, 3), committed_context=True, draft_vocab_size=48)


def params_of(sampling, max_new_tokens=9):
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, **sampling)


def watch(monkeypatch, *, is_strict=True) -> list[list[int]]:
    """Draw every draft untouched by the host; the list grows by each draft's numbers of active sequences."""
    drafts, draw = [], Drafter._draw

    def watched(self, plan, questions):
        drafts.append(plan.nums_active)
        with host_is_untouched() if is_strict else nullcontext():
            return draw(self, plan, questions)

    monkeypatch.setattr(Drafter, "_draw", watched)
    return drafts


def check(model, monkeypatch, params, prompts=PROMPTS, **options):
    """Texts and counts of drafts are those of drafts that are drawn token by token."""
    options = {"method": "hispec", "num_draft_tokens": 3, "num_blocks": 60} | options
    found = []
    for is_watched in (True, False):
        with monkeypatch.context() as patch:
            if is_watched:
                drafts = watch(patch)
            else:
                draft = Drafter.draft
                patch.setattr(
                    Drafter,
                    "draft",
                    lambda self, sequences, counts, *rest, draft=draft: draft(self, sequences, [1] * len(counts)),
                )
            engine = Engine(model, **options)
            engine._hierarchy._generator.manual_seed(7)
            completions = engine.generate(prompts, params)
        counts = {name: vars(level) | {"seconds": 0} for name, level in engine.stats.levels.items()}
        found.append([(c.token_ids, c.origins) for c in completions] + [counts])
    assert found[0] == found[1]
    return drafts


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_rule(model, monkeypatch, name):
    # One alone where the one before was not.
    prompts = PROMPTS[: 1 + 2 * (list(SAMPLINGS).index(name) % 2)]
    drafts = check(model, monkeypatch, params_of(SAMPLINGS[name]), prompts)
    assert max(map(len, drafts)) == 3


@pytest.mark.parametrize(
    ("architecture", "num_prompts"), [("opt", 2), ("gemma2", 2), ("gemma3", 1), ("qwen2-window", 1), ("mistral", 2)]
)
def test_every_kind_of_attention(monkeypatch, architecture, num_prompts):
    model = build_heads(shallow(build_base(architecture), 4), "random", committed_context=True)
    drafts = check(model, monkeypatch, params_of({}), PROMPTS[1 : 1 + num_prompts], method="single-layer")
    assert max(map(len, drafts)) == 3


@pytest.mark.parametrize("options", [{"exact": True}, {"num_blocks": 10, "block_size": 4}])
def test_exactly_and_preempted(base, monkeypatch, options):
    model = build_heads(shallow(base, 4), "random", head="mlp", committed_context=True)
    params = [params_of(sampling, 6 + 2 * i) for i, sampling in enumerate([{}, FREE | {"seed": 1}, {}])]
    assert check(model, monkeypatch, params, **options)


def test_texts_of_all_rules_and_lengths_side_by_side(model, monkeypatch):
    """Some near their end want fewer tokens than others; the texts with noise are those that they are alone."""
    params = [params_of(sampling, 4 + place) for place, sampling in enumerate(SAMPLINGS.values())]
    prompts = (PROMPTS * 2)[: len(params)]
    drafts = watch(monkeypatch)
    engine = Engine(model, method="single-layer", num_draft_tokens=4, num_blocks=80)
    completions = engine.generate(prompts, params)
    assert [len(completion.token_ids) for completion in completions] == [p.max_new_tokens for p in params]
    assert any(nums[0] > nums[-1] for nums in drafts)
    assert all(sorted(nums, reverse=True) == nums for nums in drafts)
    for prompt, p, completion in zip(prompts, params, completions, strict=True):
        if p.is_greedy or p.seed is not None:
            alone = Engine(model, method="autoregressive", num_blocks=80).generate([prompt], p)[0]
            assert completion.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, [params_of({}), params_of(PENALISED)]),
        ({"draft_policy": "dynamic", "num_draft_tokens": 4}, [params_of({}), params_of(FREE)]),
    ],
    ids=["penalties", "dynamic policy"],
)
def test_what_depends_on_the_token_before_is_drawn_one_by_one(model, monkeypatch, options, params):
    drafts = watch(monkeypatch, is_strict=False)
    Engine(model, num_blocks=40, **options).generate(PROMPTS[:2], params)
    assert {len(nums) for nums in drafts} == {1}


@pytest.mark.parametrize("name", ["greedy", "rejection", "coupled"])
def test_rows_that_are_not_finite_ask_nothing(base, monkeypatch, name):
    model = build_heads(shallow(base, 4), "random", committed_context=True)
    model.heads[0].register_forward_hook(
        lambda module, arguments, state: state.masked_fill((arguments[2] % 2 == 0)[:, None], math.nan)
    )
    completions = []
    for method in ("single-layer", "autoregressive"):
        watch(monkeypatch)
        completions.append(Engine(model, method=method, num_blocks=40).generate(PROMPTS, params_of(SAMPLINGS[name])))
    if name != "rejection":
        assert [c.token_ids for c in completions[0]] == [c.token_ids for c in completions[1]]


TOUCHES = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.numpy(),
    "bool": lambda t: bool(t.any()),
    "int": lambda t: int(t[0]),
    "if": lambda t: 1 if (t > 0).all() else 0,
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "mask": lambda t: t[t > 0],
    "set by mask": lambda t: t.clone().__setitem__(t > 0, 1),
    "list": lambda t: t[[0, 1]],
    "array": lambda t: t[np.array([0, 1])],
    "tensor": lambda t: t + torch.tensor([1, 2, 3]),
    "from numpy": lambda t: t + torch.as_tensor(np.arange(3)),
    "unique": lambda t: t.unique(),
    "other device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_the_watch_sees_every_touch(base, monkeypatch, name):
    draft = ModelRunner.draft

    def touching(self, plan, place, ids):
        if place == 1:
            TOUCHES[name](torch.arange(3))
        return draft(self, plan, place, ids)

    monkeypatch.setattr(ModelRunner, "draft", touching)
    watch(monkeypatch)
    engine = Engine(build_heads(base, "random"), method="single-layer", num_blocks=8)
    with pytest.raises(HostIsTouchedError):
        engine.generate(PROMPTS[:1], params_of({}))
