"""Tiny random models, one for each supported architecture, and heads of every quality for them."""

import copy

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

from hispec.heads import EarlyExitModel

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


def reference(
    base: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_token_id: int | list[int] | None = None
) -> list[int]:
    """What the base's own greedy `generate` answers."""
    output = base.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def build_heads(
    base: PreTrainedModel, quality: str, exit_layers: tuple[int, ...] = (2, 4), **options: object
) -> EarlyExitModel:
    """Heads that agree with the base always (`good`), by chance (`random`) or never (`adversarial`)."""
    model = EarlyExitModel.from_base(base, exit_layers, **options)
    torch.manual_seed(3)
    if quality == "random":
        with torch.no_grad():
            for parameter in model.heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    if quality == "adversarial":
        for head in model.heads:
            head.register_forward_hook(lambda *arguments: -arguments[-1])
    return model


def shallow(base: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The base with its layers past `num_layers` turned into the identity: raw exits there are perfect."""
    base = copy.deepcopy(base)
    layers = base.model.decoder.layers if base.config.model_type == "opt" else base.model.layers
    for layer in list(layers)[num_layers:]:
        for name, parameter in layer.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "out_proj", "fc2")):
                torch.nn.init.zeros_(parameter)
    return base
