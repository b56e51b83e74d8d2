"""What a user may set: for one request (`SamplingParams`) and for the engine (`EngineConfig`)."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["autoregressive", "single-layer", "hispec"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends; raises ValueError for values that make no sense."""

    max_new_tokens: int = 64
    """Most tokens to generate; fewer where the model's context ends."""
    temperature: float = 0.0
    """0 is greedy; else logits are divided by it."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability (at least one); 1 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Generate on past the model's own end-of-sequence tokens."""
    seed: int | None = None
    """With a seed the text is the same in any batch, by any method; without one it is drawn anew."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or positive")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie between 0 and 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken every time."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs; raises ValueError for values that cannot work."""

    method: Method = "hispec"
    """`autoregressive`: the base alone; `single-layer`: the first exit drafts for it; `hispec`: two exits."""
    num_draft_tokens: int = 2
    """Tokens drafted before each verification of a draft (the paper's N_d)."""
    num_provisional_tokens: int = 4
    """Provisional tokens that the target waits for under `hispec` (the paper's N_i)."""
    block_size: int = 16
    """Tokens in a block of the KV cache."""
    num_blocks: int | None = None
    """Blocks of the KV cache; None makes room for `max_num_seqs` full contexts, within a quarter of the memory."""
    max_num_seqs: int = 16
    """Most sequences that run at once."""
    max_prefill_tokens: int = 4096
    """Most prompt tokens read in one step; a longer prompt is read alone."""
    pack_weights: bool | None = None
    """On a CPU, keep the weights a second time in the layout of its matrix kernels: decoding is then up to half as
    long. None does so where the copy takes at most half of the memory that is free."""

    exact: bool = False
    """Greedy and seeded texts are the same to the bit by every method, draft length, batch and chunk of a prompt, and
    after a preemption, on one machine with one number of threads; tried when the engine starts. Slower: see README."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method {self.method!r} is unknown; choose one of {', '.join(get_args(Method))}")
        for name in (
            "num_draft_tokens",
            "num_provisional_tokens",
            "block_size",
            "max_num_seqs",
            "max_prefill_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks is {self.num_blocks}; it must be at least 1, or None")
