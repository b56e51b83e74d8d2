"""Tiny random models, one for each supported architecture, and heads of every quality for them."""

import copy
import hashlib

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hispec.heads import ARCHITECTURES, EarlyExitModel

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


WINDOW = {"sliding_window": 8}
UNTIED = {"tie_word_embeddings": False}  # tied random models say the same token again and again
GEMMA = GROUPED | UNTIED | WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 3}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}

BASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2-window": ("qwen2", GROUPED | WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16}),
    "opt": ("opt", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "opt-350m": ("opt", SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "mistral": ("mistral", GROUPED | WINDOW | {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA | LAYER_TYPES | {"attn_logit_softcapping": 2.0}),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | LAYER_TYPES
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
            }
        },
    ),
    "gpt2": ("gpt2", SIZES | UNTIED | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("gpt_neox", SIZES | {"intermediate_size": 64, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "gpt-neox-serial": ("gpt_neox", SIZES | {"intermediate_size": 64, "use_parallel_residual": False}),
    "phi": ("phi", GROUPED | {"qk_layernorm": True, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "phi3": ("phi3", GROUPED | WINDOW | {"partial_rotary_factor": 0.5}),
    "cohere": ("cohere", GROUPED | {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("cohere2", GROUPED | WINDOW | LAYER_TYPES | {"logit_scale": 0.3}),
    "granite": (
        "granite",
        GROUPED
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
            "attention_bias": True,
        },
    ),
    "mixtral": ("mixtral", GROUPED | WINDOW | EXPERTS | {"num_local_experts": 4}),
    "qwen3-moe": (
        "qwen3_moe",
        GROUPED
        | WINDOW
        | EXPERTS
        | {"use_sliding_window": True, "num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
}
"""For each architecture and variant its `model_type` and a config in which everything that it can apply bites."""

ARCHITECTURE_NAMES = list(BASES)


def build_base(architecture: str, **changes: object) -> PreTrainedModel:
    """A seeded random model whose logits differ clearly from token to token."""
    torch.manual_seed(0)
    model_type, options = BASES[architecture]
    base = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**(options | changes)))
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=0.1)
    return base.float().eval()


_TEXTS: dict[tuple[object, ...], tuple[int, list[int]]] = {}
"""By all that decides a text but its length: how long it might become, and the text."""


def reference(
    base: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_token_id: int | list[int] | None = None
) -> list[int]:
    """What the base's own greedy `generate` answers; one of the same weights and settings is asked once.

    A greedy text of fewer tokens is the beginning of a longer one.
    """
    fingerprint = _fingerprint(base)
    if fingerprint is None:
        return _generate(base, prompt, max_new_tokens, eos_token_id)
    key = (fingerprint, tuple(prompt), str(eos_token_id))
    longest, text = _TEXTS.get(key, (0, []))
    if longest < max_new_tokens:
        text = _generate(base, prompt, max_new_tokens, eos_token_id)
        _TEXTS[key] = max_new_tokens, text
    return text[:max_new_tokens]


def _generate(
    base: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_token_id: int | list[int] | None
) -> list[int]:
    output = base.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def _fingerprint(base: PreTrainedModel) -> str | None:
    """Of modules, settings and tensors; None where something else may have a say: adapters, hooks, replaced parts."""
    for module in base.modules():
        is_stock = type(module).__module__.startswith(("torch.nn.", "transformers."))
        if not is_stock or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return None
    settings = (base, base.config, base.config._attn_implementation, base.generation_config)
    digest = hashlib.sha256("".join(map(str, settings)).encode())
    for name, tensor in base.state_dict().items():
        digest.update(f"{name}{tensor.dtype}".encode())
        digest.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


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
    last = ("o_proj", "down_proj", "out_proj", "fc2", "c_proj", "dense", "dense_4h_to_h")
    for layer in list(ARCHITECTURES[base.config.model_type](base).layers)[num_layers:]:
        for name, parameter in layer.named_parameters():
            if any(part in last for part in name.split(".")):
                torch.nn.init.zeros_(parameter)
    return base
