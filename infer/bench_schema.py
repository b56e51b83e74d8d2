"""The schema of `benchmark.json`, and of what `hispec-bench --json` prints.

Seconds, bytes and shares (0 to 1) are plain numbers; null stands where a thing was not measured or does not exist.

`measurements.jsonl` beside it holds what it was made of: a line `{"start": ...}` with all that makes two runs the same
benchmark, a line for each timed call, and `{"end": true}`. A call has `set`, `temperature`, `batch_size`, `repeat`,
`group` (which batch of the set), `method`, `places` and `prompt_ids` (of the set's prompts), `num_prompt_tokens`,
`error` (what a peer refused with, or null), and, where it is null, `token_ids`, `seconds`, `first_seconds` (to the
first token of each prompt), `peak_bytes`, `stats` (as of a completion, over the batch; null for a peer) and `check`.
"""

from typing import Any, TypedDict


class Spread(TypedDict):
    """A quantity over all calls of a cell, each prompt or batch and repeat once."""

    median: float
    q1: float
    """A quarter of the values lie below."""
    q3: float
    """A quarter lie above."""
    num_values: int


class Ratio(TypedDict):
    """Of tokens a second to another method's on the same prompt or batch in the same round, over all such pairs."""

    mean: float
    """Geometric. Prompts differ so much that a median jumps from one to the next."""
    q1: float
    """A quarter of the values lie below."""
    q3: float
    """A quarter lie above."""
    num_values: int


class LevelResult(TypedDict):
    """One level, over all calls."""

    num_rounds: int
    """Verifications; of the draft level the tokens that it drafted."""
    num_drafted: int
    """Tokens put before it."""
    num_accepted: int
    acceptance_rate: float | None
    acceptance_length: float | None
    """Tokens emitted per verification, with the recovered or bonus token."""
    accepted_per_position: list[float]
    """`[k]`: share kept of the tokens at place k of a draft, of all drafts that had one there."""
    num_layer_passes: int
    """Decoder layers run, each token counted."""
    seconds: float


class Check(TypedDict):
    """Whether the texts are the model's own."""

    num_texts: int
    num_equal: int
    """Token-identical to the greedy `generate` of one prompt; sampled, to our plain decoding with the same seed."""
    share_agreeing: float
    """Of the new tokens those before a text's first difference."""
    share_chosen: float
    """Teacher-forced: of the new tokens those that are the model's own choice given all before them, as its own forward
    reads every text that is not equal. What a lossy method's speed is to be held against."""
    largest_gap: float | None
    """Of texts that are not equal: by how much the model's own choice is ahead of a token at most, read by its own
    forward; null where a token cannot be the model's choice at all."""
    is_lossless: bool
    """Equal, or in 16 bits nowhere further from the model's choice than `max_gap`."""


class Cell(TypedDict):
    """One method on one set of prompts, at one batch size and temperature."""

    set: str
    """`all` takes the calls of all sets together."""
    temperature: float
    batch_size: int
    method: str
    refused: str | None
    """What a peer, or a lossy method, said instead of an answer; then all that follows is null."""
    num_calls: int
    num_new_tokens: int
    tokens_per_second: Spread | None
    """New tokens a second, prefill included."""
    ratio: Ratio | None
    """To `generate`."""
    ratio_to_autoregressive: Ratio | None
    """To our own engine without drafts, where that was run."""
    seconds_per_token: Spread | None
    """Behind the first token, of the longest answer of the batch."""
    seconds_to_first_token: Spread | None
    """Mean of the batch."""
    levels: dict[str, LevelResult] | None
    """By `draft`, `intermediate` and `target`; null for peers."""
    time_shares: dict[str, float] | None
    """By `prefill`, each level, and `other`; they add up to 1."""
    verification_to_draft_time: dict[str, float] | None
    """By verifying level: seconds of a verification over seconds of drafting one token."""
    layers_per_token: float | None
    """Decoder layers run in rounds, per token that rounds committed."""
    wasted_layers_per_token: float | None
    """Of these, those beyond the model's own depth: tokens that were turned down, and the layers of heads."""
    skipped_share: float | None
    """Of the tokens behind the prefill's those that the target was never asked about: 0 for lossless methods, null for
    peers."""
    peak_bytes: int | None
    """The most of `memory_kind` in use during its calls."""
    check: Check | None
    """Null for sampled peers, where any text may be the model's own."""


class MethodResult(TypedDict):
    """One method."""

    promise: str
    """`lossless`, `lossy` or `peer`."""
    about: str
    added_bytes: dict[str, dict[str, int]] | None
    """Computed, by level below the target: what it adds to the base in `weights`, `kv_cache` and `hidden_states`."""


class Result(TypedDict):
    """The whole document."""

    schema: int
    """2; goes up when a field changes its meaning or goes away."""
    benchmark: dict[str, Any]
    """What was measured: `model`, `adapter`, digests of both (`weights`, `heads`), `dtype`, `device`, `num_threads`,
    `huge_pages` (whether memory was to be in such), `has_kernels` (our own, on a CPU), `versions`, `sets` (by name:
    number of prompts, digest of their tokens), `methods`, batch sizes, temperatures, lengths, seed and repeats."""
    is_complete: bool
    """False where the time limit of `--quick` came before the last round."""
    base_bytes: int
    """Of the base's weights."""
    memory_kind: str | None
    """What `peak_bytes` is: `device` (allocated by torch on the GPU) or `process` (resident memory of the whole
    process, with all methods loaded: an upper bound)."""
    max_gap: float
    """The bound of `is_lossless`."""
    is_lossless: bool
    """Whether every text of every method that promises it is the model's own."""
    methods: dict[str, MethodResult]
    cells: list[Cell]
