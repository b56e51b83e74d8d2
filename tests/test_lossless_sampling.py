"""Sampled output is distributed as the base's own: the whole loop against exact enumeration."""

import itertools
import math

import pytest
import torch
from scipy import stats

from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams, free_drafts, ngram_proposer
from hispec.infer import hierarchy as hierarchy_module
from hispec.infer.adaptive_exits import AdaptiveExits
from hispec.infer.hierarchy import Hierarchy
from hispec.infer.logits_processor import LogitsProcessor
from hispec.infer.ngram_proposer import NgramProposer
from hispec.infer.sampling import to_probs

from .models import build_base, build_heads, shallow

VOCAB, LENGTH, NUM_SAMPLES = 5, 4, 4500
ALPHA, MAX_VARIATION = 1e-4, 1.35
PROMPTS = [[3, 1, 4], [2], [2, 2, 0, 1, 3, 4, 1]]
PLAIN = {"temperature": 1.0}
FILTERED = {"temperature": 1.3, "top_k": 4, "top_p": 0.9}
SAMPLINGS = {
    "plain": PLAIN,
    "filtered": FILTERED,
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 2.0, "min_p": 0.2},
    "penalised": {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 0.7, 1: -0.5},
    },
    "banned": {"temperature": 1.0, "banned_token_ids": (2,), "min_new_tokens": 3, "stop_token_ids": (4,)},
}


BASELINES = {"adadecode": {"exit_confidence": 0.4}, "ngram": {"min_ngram": 1}}
"""So that all exits, and n-grams of a few tokens, are met often."""


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """Three levels that disagree strongly, over five tokens."""
    base = build_base("llama", vocab_size=VOCAB, num_hidden_layers=3, hidden_size=16, tie_word_embeddings=False)
    with torch.no_grad():
        base.lm_head.weight.mul_(0.6)
    model = build_heads(base, "random", (1, 2), committed_context=True, draft_vocab_size=4)
    with torch.no_grad():
        # Drafts of a little of everything, so that no branch is rare.
        model.heads[0].norm.weight.mul_(0.4)
    return model


@pytest.fixture
def eager_copies(monkeypatch):
    """A batch of hundreds copies from n-grams as if it were one sequence, and so meets such drafts often."""
    monkeypatch.setattr(free_drafts, "MAX_ROWS", 10**9)
    monkeypatch.setattr(free_drafts, "ROW_COST", 0.0)
    monkeypatch.setattr(ngram_proposer, "FIRST_SHARES", (0.6,) * 6)


def enumerate_target(base, prompt, sampling) -> dict[tuple[int, ...], float]:
    """The exact probability of the second to the `LENGTH`-th token (the first comes from the prefill)."""
    params = SamplingParams(**sampling)
    continuations = list(itertools.product(range(VOCAB), repeat=LENGTH))
    inputs = torch.tensor([[*prompt, *continuation[:-1]] for continuation in continuations])
    with torch.no_grad():
        logits = base(inputs).logits[:, len(prompt) - 1 :]
    if params.changes_logits:
        # Each continuation by itself, and every row from nothing: no incremental state is trusted here.
        for b, continuation in enumerate(continuations):
            for row in range(LENGTH):
                fresh = LogitsProcessor(params, prompt, params.stop_token_ids, VOCAB, logits.device)
                start = len(prompt) - 1 + row
                logits[b, row] = fresh(logits[b, row : row + 1].clone(), continuation[:row], row, start)[0]
    rows = logits.reshape(-1, VOCAB)
    settings = (params.temperature, params.top_k, params.top_p, params.min_p)
    probs = to_probs(rows, *(torch.full((len(rows),), value) for value in settings)).view(-1, LENGTH, VOCAB)
    joint = probs.gather(-1, torch.tensor(continuations).unsqueeze(-1)).squeeze(-1).double().prod(-1)
    marginal: dict[tuple[int, ...], float] = {}
    for continuation, probability in zip(continuations, joint.tolist(), strict=True):
        marginal[continuation[1:]] = marginal.get(continuation[1:], 0.0) + probability
    return marginal


def sample(model, sampling, *, seeded, method="hispec", num_samples=NUM_SAMPLES, **options) -> tuple[dict, Engine]:
    """Counts of continuations for each prompt, drawn in ragged batches, as others end and come."""
    usual = {"num_draft_tokens": 2, "num_provisional_tokens": 4, "max_num_seqs": 200, "num_blocks": 700}
    engine = Engine(model, method=method, **{**usual, "block_size": 4, **options})
    engine._hierarchy._generator.manual_seed(11)
    counts: dict[int, dict[tuple[int, ...], int]] = {place: {} for place in range(len(PROMPTS))}
    each = num_samples // len(PROMPTS)
    prompts = [prompt for _ in range(each) for prompt in PROMPTS]
    params = [
        SamplingParams(max_new_tokens=LENGTH + 2, ignore_eos=True, seed=index if seeded else None, **sampling)
        for index in range(len(prompts))
    ]
    for index, completion in enumerate(engine.generate(prompts, params)):
        table = counts[index % len(PROMPTS)]
        tokens = tuple(completion.token_ids[1:LENGTH])
        table[tokens] = table.get(tokens, 0) + 1
    return counts, engine


def deviations(model, counts, sampling) -> list[tuple[float, float]]:
    """For each prompt the chi-square p-value, and the total variation over what sampling noise alone would give."""
    found = []
    for place, prompt in enumerate(PROMPTS):
        expected = enumerate_target(model.base, prompt, sampling)
        total = sum(counts[place].values())
        impossible = sum(n for tokens, n in counts[place].items() if expected[tokens] == 0)
        variation = sum(abs(counts[place].get(t, 0) / total - p) for t, p in expected.items()) / 2
        # Cells of few expected counts are put together, as the test demands.
        common = [t for t, p in expected.items() if p * total >= 5]
        observed = [counts[place].get(t, 0) for t in common]
        wanted = [expected[t] * total for t in common]
        rest = total - sum(wanted)
        if rest > 1:
            observed.append(total - sum(observed))
            wanted.append(rest)
        scale = sum(observed) / sum(wanted)
        p_value = stats.chisquare(observed, [w * scale for w in wanted]).pvalue
        noise = sum(math.sqrt(2 * p * (1 - p) / (math.pi * total)) for p in expected.values()) / 2
        found.append((0.0 if impossible else float(p_value), variation / noise))
    return found


def is_lossless(model, counts, sampling) -> bool:
    return all(p > ALPHA and tv < MAX_VARIATION for p, tv in deviations(model, counts, sampling))


@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for method in ("autoregressive", "single-layer", "hispec") for name in ("plain", "filtered")]
    + [("hispec", name) for name in ("cold", "hot", "penalised", "banned")]
    + [("adadecode", "filtered"), ("adadecode", "penalised"), ("ngram", "filtered"), ("ngram", "penalised")],
)
def test_the_loop_has_the_distribution_of_the_base(model, eager_copies, method, name, seeded):
    sampling = SAMPLINGS[name]
    num_samples = NUM_SAMPLES if method == "hispec" and name in ("plain", "filtered") else NUM_SAMPLES // 3
    counts, engine = sample(
        model, sampling, seeded=seeded, method=method, num_samples=num_samples, **BASELINES.get(method, {})
    )
    assert is_lossless(model, counts, sampling), deviations(model, counts, sampling)
    for name, level in engine.stats.levels.items():
        verifies = name == "target" or method == "hispec"
        if name != "draft" and verifies and method != "autoregressive":
            assert level.num_drafted
            assert 0.05 < level.acceptance_rate < 0.95


@pytest.mark.parametrize("seeded", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    ("factor", "lowest", "highest"),
    [(1.0, 1.0, 1.0), (-1.0, 0.0, 0.0), (40.0, 0.1, 0.9)],
    ids=["equal", "disjoint", "one-hot"],
)
def test_heads_at_the_extremes_change_no_distribution(factor, lowest, highest, seeded):
    """Heads that say what the target says, that say only what it never says, and that are sure of one token."""
    base = build_base("llama", vocab_size=VOCAB, num_hidden_layers=3, hidden_size=16, tie_word_embeddings=False)
    with torch.no_grad():
        base.lm_head.weight.mul_(0.6)
    model = build_heads(shallow(base, 1), "good", (1, 2), head="norm")
    for head in model.heads:
        head.register_forward_hook(lambda module, arguments, state: state * factor)
    # Of five tokens the two likeliest: by negated logits these are two others.
    sampling = {"temperature": 1.0, "top_k": 2}
    counts, engine = sample(model, sampling, seeded=seeded, num_samples=NUM_SAMPLES // 3)
    assert is_lossless(model, counts, sampling), deviations(model, counts, sampling)
    assert lowest <= engine.stats.levels["target"].acceptance_rate <= highest


def no_residual(draft_ids, draft_probs, target_probs, num_drafted, uniforms):
    """Wrong: the recovered token is drawn from the target itself."""
    accepted, _ = hierarchy_module_verify(draft_ids, draft_probs, target_probs, num_drafted, uniforms)
    row = torch.arange(len(draft_ids))
    return accepted, hierarchy_module.draw(target_probs[row, accepted], uniforms[:, -1])


hierarchy_module_verify = hierarchy_module.verify_by_rejection


def mutate_no_residual(monkeypatch):
    monkeypatch.setattr(hierarchy_module, "verify_by_rejection", no_residual)


def mutate_skip_target(monkeypatch):
    """Wrong: the target believes the intermediate level."""
    right = Hierarchy._verify_rows

    def verify(self, sequences, drafts, rows):
        accepted, next_ids = right(self, sequences, drafts, rows)
        if any(drafts) and all(sequence.num_computed[-1] == sequence.num_known for sequence in sequences):
            accepted = [len(draft) for draft in drafts]
        return accepted, next_ids

    monkeypatch.setattr(Hierarchy, "_verify_rows", verify)


def mutate_drop_drawn_token(monkeypatch):
    """Wrong: a drafted token that looks unlikely is thrown away."""
    right = Hierarchy._draft

    def draft(self, sequences, **options):
        right(self, sequences, **options)
        for sequence in sequences:
            proposal = sequence.proposed[0][-1]
            if proposal.probs[proposal.token_id] < 0.25:
                sequence.proposed[0].pop()

    monkeypatch.setattr(Hierarchy, "_draft", draft)


def mutate_ngram_probs(monkeypatch):
    """Wrong: a copied token is said to be one of several that might have been proposed."""
    right = NgramProposer._proposal

    def proposal(self, sequence, token_id):
        found = right(self, sequence, token_id)
        return found._replace(probs=found.probs * 0.7 + 0.3 / VOCAB)

    monkeypatch.setattr(NgramProposer, "_proposal", proposal)


def mutate_exit_probs(monkeypatch):
    """Wrong: an exit says that it proposed what it holds likeliest, and has drawn."""
    right = AdaptiveExits._choose

    def choose(self, sequences, rows):
        token_ids = right(self, sequences, rows)
        for row in rows:
            row.probs.mul_(row.probs == row.probs.amax())
        return token_ids

    monkeypatch.setattr(AdaptiveExits, "_choose", choose)


@pytest.mark.parametrize(
    ("method", "mutate"),
    [("ngram", mutate_ngram_probs), ("adadecode", mutate_exit_probs), ("ngram", mutate_no_residual)],
)
def test_a_baseline_that_is_wrong_is_found_out(model, eager_copies, monkeypatch, method, mutate):
    mutate(monkeypatch)
    counts, _ = sample(model, PLAIN, seeded=False, method=method, num_samples=1500, **BASELINES[method])
    assert not is_lossless(model, counts, PLAIN), deviations(model, counts, PLAIN)


@pytest.mark.parametrize("mutate", [mutate_no_residual, mutate_skip_target, mutate_drop_drawn_token])
def test_a_wrong_rule_is_found_out(model, monkeypatch, mutate):
    mutate(monkeypatch)
    counts, _ = sample(model, PLAIN, seeded=False, num_samples=NUM_SAMPLES // 3)
    assert not is_lossless(model, counts, PLAIN), deviations(model, counts, PLAIN)


def test_a_seed_gives_one_text_whatever_the_method(model):
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(8)]
    prompts = [PROMPTS[seed % 3] for seed in range(8)]
    texts = []
    for method, num_draft, num_provisional, batch in [
        ("autoregressive", 1, 1, 8),
        ("single-layer", 3, 1, 1),
        ("hispec", 2, 4, 3),
        ("hispec", 5, 2, 8),
        ("adadecode", 3, 1, 3),
        ("ngram", 4, 1, 8),
    ]:
        engine = Engine(
            model,
            method=method,
            **BASELINES.get(method, {}),
            num_draft_tokens=num_draft,
            num_provisional_tokens=num_provisional,
            max_num_seqs=batch,
            num_blocks=100,
        )
        texts.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert texts.count(texts[0]) == len(texts)
    assert len({tuple(text) for text in texts[0]}) > 1
