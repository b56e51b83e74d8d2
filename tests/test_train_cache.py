"""The state cache against the base model's own hidden states."""

import json

import pytest
import torch

from hispec.heads import Backbone
from hispec.train import cache_writer
from hispec.train.cache import StateCache, bytes_per_token
from hispec.train.cache_writer import extend_cache

from .train_support import random_responses

FINGERPRINT = {"weights": "x"}


@pytest.fixture(scope="module")
def backbone(request):
    return Backbone(request.getfixturevalue("base"))


def extend(folder, responses, backbone, layers, **options):
    return extend_cache(
        folder, responses, backbone, layers, fingerprint=FINGERPRINT, **({"batch_tokens": 64} | options)
    )


def own_states(base, response):
    ids = torch.tensor([[*response.prompt_token_ids, *response.token_ids]])
    with torch.no_grad():
        return base(ids, output_hidden_states=True)


def check(cache, base, backbone, responses, layers):
    """Every column equals what the base itself computes, one sequence at a time."""
    batch = cache.read(range(len(responses)), layers, backbone)
    start = 0
    for response in responses:
        output = own_states(base, response)
        rows = slice(start, start + response.length)
        for layer in layers:
            torch.testing.assert_close(batch.hidden[layer][0, rows], output.hidden_states[layer][0])
        torch.testing.assert_close(batch.final[rows], output.hidden_states[-1][0])
        loss_rows = [row for row in batch.loss_rows.tolist() if rows.start <= row < rows.stop]
        num_prompt = len(response.prompt_token_ids)
        assert loss_rows == list(range(start + num_prompt, max(start + num_prompt, rows.stop - 1)))
        logits = output.logits[0, [row - start for row in loss_rows]]
        torch.testing.assert_close(batch.log_normaliser[loss_rows], logits.logsumexp(-1))
        assert torch.equal(batch.top_token[loss_rows], logits.argmax(-1))
        start += response.length


def test_cached_states_are_the_base_models_own(base, backbone, tmp_path):
    responses = random_responses()
    cache = extend(tmp_path, responses, backbone, [0, 2, 3])
    assert cache.sequences == responses
    assert cache.exit_layers == (2, 3)  # layer 0 is embedded anew
    check(cache, base, backbone, responses, [0, 2, 3])


def test_cache_is_extended_by_layers_and_by_responses(base, backbone, tmp_path):
    responses = random_responses()
    extend(tmp_path, responses[:7], backbone, [2])
    kept = (tmp_path / "layer_2.bin").read_bytes()
    cache = extend(tmp_path, responses, backbone, [1, 4])
    check(cache, base, backbone, responses, [1, 4])
    assert StateCache(tmp_path, [4]).sequences == responses
    assert StateCache(tmp_path).sequences == responses[:7]  # layer 2 is not there for the others
    with pytest.raises(ValueError, match="but no layer_2"):
        cache.read([0], [2], backbone)
    cache = extend(tmp_path, responses, backbone, [2, 4])
    assert (tmp_path / "layer_2.bin").read_bytes().startswith(kept)
    assert cache.exit_layers == (2, 4)
    check(StateCache(tmp_path), base, backbone, responses, [1, 2, 4])


def test_fewer_responses_are_honoured_and_what_is_there_is_kept(backbone, tmp_path, monkeypatch):
    responses = random_responses()
    extend(tmp_path, responses, backbone, [2])
    monkeypatch.setattr(cache_writer, "_compute", None)  # nothing is left to compute
    assert extend(tmp_path, responses[:3], backbone, [2]).sequences == responses[:3]
    max_gb = bytes_per_token(backbone, [2]) * sum(r.length for r in responses[:5]) / 1e9
    assert extend(tmp_path, responses, backbone, [2], max_gb=max_gb).sequences == responses[:5]
    assert extend(tmp_path, responses, backbone, [2]).sequences == responses


def test_interrupted_cache_goes_on(base, backbone, tmp_path, monkeypatch):
    responses = random_responses()
    compute, num_calls = cache_writer._compute, 0

    def interrupted(*args):
        nonlocal num_calls
        num_calls += 1
        columns = compute(*args)
        if num_calls == 3:  # in the middle of a batch, one column written and the others not
            yield next(columns)
            raise KeyboardInterrupt
        yield from columns

    monkeypatch.setattr(cache_writer, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extend(tmp_path, responses, backbone, [1, 3])
    partly = StateCache(tmp_path)
    assert 0 < len(partly.sequences) < len(responses)
    num_calls = 10
    cache = extend(tmp_path, responses, backbone, [1, 3])
    assert num_calls - 10 == len(list(cache_writer._pack(responses, 64))) - 2
    check(cache, base, backbone, responses, [1, 3])


def test_states_of_16_bits_keep_their_bits(make_base, tmp_path):
    base = make_base("llama").bfloat16()
    backbone = Backbone(base)
    responses = random_responses(3)
    cache = extend(tmp_path, responses, backbone, [2], batch_tokens=1)
    batch = cache.read([1], [2], backbone)
    assert batch.hidden[2].dtype == batch.final.dtype == torch.bfloat16
    torch.testing.assert_close(
        batch.hidden[2][0], own_states(base, responses[1]).hidden_states[2][0], rtol=0.02, atol=0.02
    )
    assert (tmp_path / "final.bin").stat().st_size == sum(r.length for r in responses) * 32 * 2


def test_cache_is_bounded(backbone, tmp_path, capsys):
    responses = random_responses()
    max_gb = bytes_per_token(backbone, [2]) * sum(r.length for r in responses[:5]) / 1e9
    cache = extend(tmp_path, responses, backbone, [2], max_gb=max_gb)
    assert cache.sequences == responses[:5]
    assert "5 of 20 responses" in capsys.readouterr().err
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) <= max_gb * 1e9
    with pytest.raises(ValueError, match="not even the first response fits"):
        extend(tmp_path, responses, backbone, [2], max_gb=1e-9)


def test_foreign_cache_is_refused(backbone, make_base, tmp_path):
    responses = random_responses()
    extend(tmp_path, responses, backbone, [2])
    with pytest.raises(ValueError, match="other responses"):
        extend(tmp_path, random_responses(seed=1), backbone, [2])
    with pytest.raises(ValueError, match="fingerprint"):
        extend_cache(tmp_path, responses, backbone, [2], fingerprint={"weights": "y"})
    with pytest.raises(ValueError, match="dtype float32, now it is bfloat16"):
        extend(tmp_path, responses, Backbone(make_base("llama").bfloat16()), [2])
    with pytest.raises(ValueError, match="but no layer_5"):
        StateCache(tmp_path).read([0], [5], backbone)
    with pytest.raises(ValueError, match="but no layer_5"):
        StateCache(tmp_path, [5])
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"format": 9}))
    with pytest.raises(ValueError, match="has format 9"):
        StateCache(tmp_path)
    for damaged in ("", '{"format": 1', "[]", '{"format": 1}', "\0"):
        (tmp_path / "index.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"index\.json is damaged; remove the folder"):
            StateCache(tmp_path)
    with pytest.raises(ValueError, match="holds no state cache"):
        StateCache(tmp_path / "none")
