"""From an adapter to tokens: lossless, batched, hierarchical self-speculative decoding."""

from .async_engine import AsyncEngine
from .completion import Completion
from .config import EngineConfig, SamplingParams
from .custom_generate import hispec_generate
from .engine import Engine
from .follower import Delta, Follower

__all__ = [
    "AsyncEngine",
    "Completion",
    "Delta",
    "Engine",
    "EngineConfig",
    "Follower",
    "SamplingParams",
    "hispec_generate",
]
