"""Tiny random models, one for each supported architecture."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# The models are tiny: a second thread only waits for the first.
torch.set_num_threads(1)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64}


def build_base(architecture: str, **changes: object) -> PreTrainedModel:
    """A seeded random model whose logits differ clearly from token to token."""
    torch.manual_seed(0)
    if architecture == "llama":
        base = LlamaForCausalLM(LlamaConfig(**(GROUPED | {"tie_word_embeddings": True} | changes)))
    elif architecture == "qwen2":
        base = Qwen2ForCausalLM(Qwen2Config(**(GROUPED | changes)))
    elif architecture == "qwen2-window":
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
        base = Qwen2ForCausalLM(Qwen2Config(**(GROUPED | window | changes)))
    elif architecture == "qwen3":
        base = Qwen3ForCausalLM(Qwen3Config(**(GROUPED | {"head_dim": 16} | changes)))
    elif architecture == "opt":
        base = OPTForCausalLM(OPTConfig(**(SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32} | changes)))
    elif architecture == "opt-350m":
        shape = {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
        base = OPTForCausalLM(OPTConfig(**(SIZES | shape | changes)))
    else:
        raise ValueError(architecture)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.1)
    return base.float().eval()


ARCHITECTURE_NAMES = ["llama", "qwen2", "qwen2-window", "qwen3", "opt", "opt-350m"]


@pytest.fixture(scope="session", params=ARCHITECTURE_NAMES)
def any_base(request: pytest.FixtureRequest) -> PreTrainedModel:
    """One tiny base for each architecture and variant."""
    return build_base(request.param)


@pytest.fixture(scope="session")
def base() -> PreTrainedModel:
    """A tiny Llama."""
    return build_base("llama")


@pytest.fixture(scope="session")
def make_base() -> Callable[..., PreTrainedModel]:
    """Build a tiny base by architecture name, with changes to its config."""
    return build_base
