"""What an exit head is: its config, its transform, and the base model that it hangs on."""

from .architectures import ARCHITECTURES
from .attention import DenseAttention, capped_attention
from .backbone import Attend, Backbone
from .config import ExitHeadConfig, HeadKind, check_exit_layers, head_kinds
from .draft_verifier import CONFIDENCE_FEATURES, DraftVerifier, draft_features, num_features
from .early_exit_model import EarlyExitModel
from .exit_head import ExitHead, context_positions
from .stand_in import base_of, held_module, is_quantized

__all__ = [
    "ARCHITECTURES",
    "CONFIDENCE_FEATURES",
    "Attend",
    "Backbone",
    "DenseAttention",
    "DraftVerifier",
    "EarlyExitModel",
    "ExitHead",
    "ExitHeadConfig",
    "HeadKind",
    "base_of",
    "capped_attention",
    "check_exit_layers",
    "context_positions",
    "draft_features",
    "head_kinds",
    "held_module",
    "is_quantized",
    "num_features",
]
