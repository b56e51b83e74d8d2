"""What an evaluation counts, against counting by hand; and what it says of a draft, against the engine's own rounds."""

import pytest
import torch

from hispec.checkpoints import fingerprint
from hispec.heads import EarlyExitModel
from hispec.infer import Engine, SamplingParams
from hispec.train import Response, evaluate
from hispec.train.cache_writer import extend_cache
from hispec.train.evaluate import hop_scores
from hispec.train.tally import Calibration, Chains
from hispec.train.windows import fixed_distance


def test_chains_count_every_draft_as_far_as_it_goes():
    generator = torch.Generator().manual_seed(0)
    chains, reached, kept = Chains(4), [0] * 4, [0] * 4
    for num_rows in (9, 3, 1, 0, 5):
        agrees = [torch.rand(num_rows, generator=generator) < 0.7 for _ in range(4)]
        chains.add(agrees)
        for start in range(num_rows):
            for place in range(min(4, num_rows - start)):
                reached[place] += 1
                if not agrees[place][start + place]:
                    break
                kept[place] += 1
    result = chains.result()
    assert result["num_drafts"] == reached
    assert result["agreement"] == [round(hits / number, 5) for hits, number in zip(kept, reached, strict=True)]
    assert Chains(3).result() == {"agreement": [], "num_drafts": []}


def test_calibration_counts_by_tenth():
    generator = torch.Generator().manual_seed(0)
    confidence = torch.cat([torch.rand(400, generator=generator), torch.tensor([0.0, 1.0, 1.0])])
    agreement = (torch.rand(403, generator=generator) < confidence).float()
    calibration = Calibration()
    for part in (slice(0, 100), slice(100, 403)):
        calibration.add(confidence[part], agreement[part])
    entries = calibration.result()
    assert sum(entry["num_tokens"] for entry in entries) == 403
    for entry in entries:
        low = entry["from"]
        chosen = (confidence >= low) & ((confidence < low + 0.1) | (low == 0.9))
        assert entry["num_tokens"] == chosen.sum()
        assert entry["confidence"] == pytest.approx(confidence[chosen].mean().item(), abs=1e-5)
        assert entry["agreement"] == pytest.approx(agreement[chosen].mean().item(), abs=1e-5)


def level_share(level):
    """Of the first tokens of drafts, those that were kept."""
    return level.accepted_per_position[0] / level.drafted_per_position[0]


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_places_are_those_of_the_engine(base, tmp_path, num_draft_tokens):
    """Replayed from the scores alone, greedy decoding accepts in every round what the engine accepts."""
    model = EarlyExitModel.from_base(base, (3, 5), "mlp", committed_context=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for head in model.exit_heads:
            assert head.fuse is not None
            head.fuse.weight.add_(torch.randn_like(head.fuse.weight) * 0.05)
    engine = Engine(model, method="single-layer", num_draft_tokens=num_draft_tokens, num_blocks=64)
    prompts = [[5, 6, 7], [9], [11, 12, 40, 8]]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=40, ignore_eos=True))
    responses = [
        Response(prompt_id=str(number), kind="k", sample=0, prompt_token_ids=prompt, token_ids=completion.token_ids)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    cache = extend_cache(tmp_path, responses, model.backbone, [3, 5], fingerprint=fingerprint(base))
    report = evaluate(model, cache, range(3), max_window=4)
    for number, completion in enumerate(completions):
        batch = cache.read([number], (3, 5), model.backbone)
        agrees = [
            hop_scores(model, batch, fixed_distance(batch.lengths, batch.spans, place + 1))["3->target"][0].bool()
            for place in range(num_draft_tokens)
        ]
        newest, accepted = 0, []
        while newest < 39:
            length = min(num_draft_tokens, 38 - newest)
            kept = [bool(agrees[place][newest + place]) for place in range(length)]
            accepted.append(kept.index(False) if False in kept else length)
            newest += accepted[-1] + 1
        level = completion.stats.levels["target"]
        assert level.num_rounds == len(accepted)
        assert level.num_accepted == sum(accepted)
        assert level.accepted_per_position == [
            sum(number > place for number in accepted) for place in range(max(accepted))
        ]
    assert sum(completion.stats.levels["target"].num_accepted for completion in completions) > 5
    wanted = {"exit_layers": [3], "num_draft_tokens": num_draft_tokens, "num_provisional_tokens": 1}
    (course,) = (each for each in report["courses"]["greedy"] if wanted.items() <= each.items())
    assert course["num_rounds"] == engine.stats.levels["target"].num_rounds
    assert course["kept"][0] == pytest.approx(level_share(engine.stats.levels["target"]), abs=1e-5)
    chain = report["by_place"]["3->target"]
    assert chain["agreement"][0] == report["by_distance"]["1"]["3->target"]["agreement"]
    assert chain["num_drafts"][0] == report["num_tokens"] == 3 * 39
    assert report["by_distance"]["1"] != report["by_distance"]["4"]
