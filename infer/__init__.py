"""From an adapter to tokens: lossless, batched, hierarchical self-speculative decoding."""

from .config import EngineConfig, SamplingParams
from .engine import Completion, Delta, Engine

__all__ = ["Completion", "Delta", "Engine", "EngineConfig", "SamplingParams"]
