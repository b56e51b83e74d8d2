"""Where each architecture keeps what the backbone walks, and the numbers that its own forward applies in between."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Parts(NamedTuple):
    """The modules of a base model and the numbers between them; None or 0 is a step that the base does not take."""

    embed_tokens: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module | None
    rotary: nn.Module | None = None
    rotary_by_layer_type: bool = False
    """Whether `rotary` has frequencies of its own for each type of attention layer."""
    embed_positions: nn.Embedding | None = None
    first_position: int = 0
    """The row of `embed_positions` that position 0 takes."""
    project_in: nn.Module | None = None
    project_out: nn.Module | None = None
    embed_multiplier: float | None = None
    logit_multiplier: float | None = None
    logit_divisor: float | None = None
    logit_cap: float | None = None
    """Logits end as `cap * tanh(logits / cap)`."""


def _llama(base: Any, **special: Any) -> Parts:
    inner = base.model
    return Parts(inner.embed_tokens, inner.layers, inner.norm, inner.rotary_emb, **special)


def _gemma(base: Any, **special: Any) -> Parts:
    # The scale of its embeddings is in the embedding module.
    return _llama(base, logit_cap=base.config.final_logit_softcapping, **special)


def _cohere(base: Any) -> Parts:
    return _llama(base, logit_multiplier=base.logit_scale)


def _granite(base: Any) -> Parts:
    return _llama(base, embed_multiplier=base.model.embedding_multiplier, logit_divisor=base.config.logits_scaling)


def _phi(base: Any) -> Parts:
    inner = base.model
    return Parts(inner.embed_tokens, inner.layers, inner.final_layernorm, inner.rotary_emb)


def _gpt_neox(base: Any) -> Parts:
    inner = base.gpt_neox
    return Parts(inner.embed_in, inner.layers, inner.final_layer_norm, inner.rotary_emb)


def _gpt2(base: Any) -> Parts:
    inner = base.transformer
    return Parts(inner.wte, inner.h, inner.ln_f, embed_positions=inner.wpe)


def _opt(base: Any) -> Parts:
    inner = base.model.decoder
    return Parts(
        inner.embed_tokens,
        inner.layers,
        inner.final_layer_norm,
        embed_positions=inner.embed_positions,
        first_position=inner.embed_positions.offset,
        project_in=inner.project_in,
        project_out=inner.project_out,
    )


ARCHITECTURES: dict[str, Callable[[Any], Parts]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _llama,
    "gemma2": _gemma,
    "gemma3_text": lambda base: _gemma(base, rotary_by_layer_type=True),
    "phi": _phi,
    "phi3": _llama,
    "cohere": _cohere,
    "cohere2": _cohere,
    "granite": _granite,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}
"""Supported `config.model_type`s; a new one needs its parts here and its row in the tests."""


def find_parts(base: Any) -> Parts:
    """The parts of `base`; raises ValueError for an architecture that is not supported, or not causal."""
    model_type = base.config.model_type
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"architecture {model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)} "
            "(a new one is added in heads/architectures.py)"
        )
    parts = ARCHITECTURES[model_type](base)
    if not all(getattr(module, "is_causal", True) for module in parts.layers.modules()):
        raise ValueError(
            f"this {model_type!r} model has attention that is not causal (use_bidirectional_attention or "
            "add_cross_attention in its config); choose a model that generates text from left to right"
        )
    return parts


def max_context(config: Any) -> int:
    """Number of positions that `config`'s model can be run over, one after another, with one set of frequencies."""
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = [config.max_position_embeddings]
    for parameters in (rope, *rope.values()):  # by layer type in some models
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            # Past this length the model's forward turns all positions by other frequencies, those of cached keys too.
            lengths.append(parameters["original_max_position_embeddings"])
    return min(lengths)
