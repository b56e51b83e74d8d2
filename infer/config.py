"""What a user may set: for one request (`SamplingParams`) and for the engine (`EngineConfig`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

Method = Literal["autoregressive", "single-layer", "hispec", "adadecode", "ngram", "lookahead", "sprinter"]
LOSSY_METHODS: tuple[Method, ...] = ("sprinter",)
"""Those whose texts are not the model's own; they run only where a user says that this is wanted."""
LOSSLESS_METHODS: tuple[Method, ...] = tuple(method for method in get_args(Method) if method not in LOSSY_METHODS)
DraftPolicy = Literal["fixed", "dynamic"]
PlanMode = Literal["auto"]

MAX_PREFILL_TOKENS, MAX_UNDISTURBED_TOKENS = 512, 2048
"""`EngineConfig.max_prefill_tokens` where nothing is said: of a step in which somebody decodes, and of one in which
nobody does, and a long prompt in one piece is read a tenth faster."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends; raises ValueError for values that make no sense.

    Applied in this order, the same at every level: repetition, presence and frequency penalty, `logit_bias`, bans
    (`banned_token_ids`, and the end tokens before `min_new_tokens`), temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int = 64
    """Most tokens to generate; fewer where the model's context ends."""
    min_new_tokens: int = 0
    """Before so many tokens no end token may be chosen, and no stop string ends the text."""
    temperature: float = 0.0
    """0 is greedy; else logits are divided by it."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability (at least one); 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least so likely, as a share of the likeliest one's probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the text so far."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the text so far, without the prompt."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the text so far, once for each time they stand there."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token id: added to its logit."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation where they first appear, whatever tokens they are made of; one may be a string."""
    include_stop: bool = False
    """Whether the text keeps the stop string that ended it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Generate on past the model's own end-of-sequence tokens."""
    seed: int | None = None
    """With a seed the text is the same in any batch, by any method; without one it is drawn anew."""
    logprobs: int | None = None
    """Return each token's log-probability under the model itself, and those of so many of the likeliest; None: none."""
    n: int = 1
    """Texts to draw for the prompt."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "banned_token_ids"):
            values: Any = getattr(self, name)
            object.__setattr__(self, name, (values,) if isinstance(values, str) else tuple(values))
        self._check_numbers()
        for name in ("stop_token_ids", "banned_token_ids"):
            for token_id in getattr(self, name):
                if not _is_integer(token_id) or token_id < 0:
                    raise ValueError(f"{name} holds {token_id!r}; token ids are integers from 0")
        for token_id, bias in self.logit_bias.items():
            if not _is_integer(token_id) or token_id < 0 or not _is_finite(bias):
                raise ValueError(f"logit_bias holds {token_id!r}: {bias!r}; it maps token ids to finite numbers")
        texts: tuple[Any, ...] = self.stop
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; stop strings are texts of at least one character")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; lower it"
            )
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n is {self.n} at temperature 0, where all texts would be the same; set a temperature")

    def _check_numbers(self) -> None:
        for name, lowest in (("max_new_tokens", 1), ("min_new_tokens", 0), ("top_k", 0), ("n", 1), ("logprobs", 0)):
            value = getattr(self, name)
            if value is None and name == "logprobs":
                continue
            if not _is_integer(value) or value < lowest:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {lowest}")
        if self.seed is not None and not _is_integer(self.seed):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer, or None")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not _is_finite(value) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}; it must lie between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_finite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a finite number, 0 for none")
        if not _is_finite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature!r}; it must be 0 (greedy) or a positive number")
        if not _is_finite(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty!r}; it must be positive, 1 for none")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return bool(self.has_penalties or self.logit_bias or self.banned_token_ids or self.min_new_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs; raises ValueError for values that cannot work."""

    method: Method = "hispec"
    """`autoregressive`: the base alone; `single-layer`: the first exit drafts for it; `hispec`: two exits. Baselines:
    `adadecode`: each drafted token leaves at the first exit that is sure of it; `ngram`: drafts are copied from the
    prompt and the text, without heads (with them: `ngram_drafts`); `lookahead`: the target drafts for itself, without
    heads; `sprinter`, LOSSY, runs only with `lossy`: tokens of the first exit that a small trained verifier trusts are
    never shown to the model for judgement."""
    num_draft_tokens: int = 2
    """Tokens drafted before each verification of a draft (the paper's N_d); the most under a dynamic policy."""
    num_provisional_tokens: int = 4
    """Provisional tokens that the target waits for under `hispec` (the paper's N_i); likewise."""
    draft_policy: DraftPolicy = "fixed"
    """`fixed`: always drafts of these lengths; `dynamic`: shorter ones where the heads are unsure of what they
    proposed, or where few of their tokens were kept of late. The text is the same."""
    min_confidence: float = 0.3
    """Under a dynamic policy: drafting goes on while all that is proposed stands with at least this probability, as
    the heads see it."""
    block_size: int = 16
    """Tokens in a block of the KV cache."""
    num_blocks: int | None = None
    """Blocks of the KV cache; None makes room for `max_num_seqs` full contexts, within a quarter of the memory."""
    max_num_seqs: int = 16
    """Most sequences that run at once."""
    max_prefill_tokens: int | None = None
    """Most prompt tokens read in one step, by all prompts together; longer prompts are read in pieces. In every step
    those that decode get their round: fewer tokens make their pauses shorter, more let a long prompt end sooner. None
    is 512 where somebody decodes and 2048 where nobody does."""
    pack_weights: bool | None = None
    """On a CPU, keep the weights a second time in the layout of its matrix kernels: decoding is then up to half as
    long. None does so where the copy takes at most half of the memory that is free."""
    cuda_graphs: bool | None = None
    """Replay passes of few rows as CUDA graphs, which spares the host the launch of every kernel; the text is the same.
    None does so where torch's paged attention kernel works: see README, GPU."""

    exact: bool = False
    """Greedy and seeded texts are the same to the bit by every method, draft length, batch and chunk of a prompt, and
    after a preemption, on one machine with one number of threads; tried when the engine starts. Slower: see README."""
    exit_layers: tuple[int, ...] | None = None
    """Which of the model's exits serve, from the draft up; None takes its shallowest, `adadecode` all."""
    plan: PlanMode | None = None
    """`auto`: the planner chooses the method and its exits for up to `max_num_seqs` sequences, and in each round how
    far to draft, if at all, by how many sequences run, what this machine takes (measured once, about fifteen seconds,
    and kept) and how often the heads were measured right, and then are."""
    replan: bool = False
    """Measure this machine anew for the plan."""
    exit_confidence: float = 0.75
    """Under `adadecode`: the probability of an exit's likeliest token with which a token leaves there."""
    ngram_drafts: bool | None = None
    """Under `single-layer` and `hispec`: a round takes its draft from the prompt and the text, where the newest tokens
    stood before and what followed promises more than the exits; such a draft costs no pass, and the target alone
    verifies it. None does so with `plan` alone."""
    num_ngram_tokens: int = 8
    """With `ngram_drafts`, and under `ngram`: most tokens copied at once; fewer where they are kept less often."""
    min_ngram: int = 1
    """Likewise: fewest of the newest tokens that must have stood in the text before,"""
    max_ngram: int = 4
    """and most that are looked for; the longest match is taken, and of equal ones the newest."""
    lookahead_window: int = 5
    """Under `lookahead`: runs of guessed tokens that the target improves side by side (the paper's W),"""
    lookahead_ngram: int = 4
    """tokens of an n-gram that they become, of which all but the first can be accepted (N),"""
    lookahead_candidates: int = 5
    """and n-grams that are verified at once, at most (G). A pass has up to (W + G) * (N - 1) rows a sequence."""
    lossy: bool = False
    """Take texts that are not the model's own: what `sprinter` needs, and nothing else takes."""
    verifier_threshold: float = 0.5
    """Under `sprinter`: how likely the verifier must hold it that the model accepts a token, for it not to be asked."""
    max_skipped_tokens: int = 8
    """Under `sprinter`: most tokens in a row without the model, which then adds one of its own."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method {self.method!r} is unknown; choose one of {', '.join(get_args(Method))}")
        if self.draft_policy not in get_args(DraftPolicy):
            raise ValueError(
                f"draft_policy {self.draft_policy!r} is unknown; choose one of {', '.join(get_args(DraftPolicy))}"
            )
        if self.plan is not None and self.plan not in get_args(PlanMode):
            raise ValueError(f"plan {self.plan!r} is unknown; it is 'auto', or None for the method that you name")
        if self.replan and self.plan is None:
            raise ValueError("replan goes with plan='auto' alone; add it, or leave replan out")
        for name in ("min_confidence", "exit_confidence", "verifier_threshold"):
            if not _is_finite(getattr(self, name)) or not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must lie between 0 and 1")
        for name in (
            "num_draft_tokens",
            "num_provisional_tokens",
            "block_size",
            "max_num_seqs",
            "min_ngram",
            "num_ngram_tokens",
            "lookahead_window",
            "lookahead_candidates",
            "max_skipped_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_prefill_tokens is not None and self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens is {self.max_prefill_tokens}; it must be at least 1")
        if self.max_ngram < self.min_ngram:
            raise ValueError(f"max_ngram is {self.max_ngram}, less than min_ngram, {self.min_ngram}; raise it")
        if self.ngram_drafts and self.method not in ("single-layer", "hispec"):
            raise ValueError(
                f"ngram_drafts stands in for the exits of single-layer and hispec, not of {self.method!r}; choose one "
                "of these two methods, or leave it out"
            )
        if self.lookahead_ngram < 2:
            raise ValueError(f"lookahead_ngram is {self.lookahead_ngram}; it must be at least 2")
        if self.method == "lookahead" and self.cuda_graphs:
            raise ValueError(
                "cuda_graphs is set, but method 'lookahead' attends by masks of ever new shapes, which no graph can "
                "hold; leave out cuda_graphs or choose another method"
            )
        self._check_lossy()
        if self.exit_layers is not None:
            object.__setattr__(self, "exit_layers", tuple(self.exit_layers))
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks is {self.num_blocks}; it must be at least 1, or None")

    def _check_lossy(self) -> None:
        if self.method not in LOSSY_METHODS:
            if self.lossy:
                raise ValueError(
                    f"lossy goes with method {' or '.join(map(repr, LOSSY_METHODS))} alone, not with {self.method!r}; "
                    "leave it out"
                )
            return
        if not self.lossy:
            raise ValueError(
                f"method {self.method!r} is lossy: its texts are not the model's own; accept that with lossy=True "
                "(--lossy), or choose another method"
            )
        if self.exact:
            raise ValueError(f"exact texts are the model's own, and those of method {self.method!r} are not; leave it")
        if self.draft_policy != "fixed":
            raise ValueError(
                f"draft_policy {self.draft_policy!r} does not go with method {self.method!r}, whose verifier decides "
                "how far to draft; leave it out"
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
