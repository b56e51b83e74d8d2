"""What an exit head is: its config, its transform, and the base model that it hangs on."""

from .architectures import ARCHITECTURES
from .attention import DenseAttention, capped_attention
from .backbone import Attend, Backbone
from .cache_folder import cache_folder
from .config import ExitHeadConfig, HeadKind, check_exit_layers, head_kinds
from .draft_verifier import CONFIDENCE_FEATURES, DraftVerifier, draft_features, num_features
from .early_exit_model import EarlyExitModel
from .exit_head import ExitHead, context_position, context_positions
from .kernel_types import Drawn, Highest, Native, Pages, Places, Pools
from .kernels import KERNEL_DTYPES, MAX_ATTENDED_ROWS, find_kernels
from .product_form import FormTable, FormTables, ProductKind, possible_forms
from .product_trial import is_timed, measure_forms
from .stand_in import base_of, held_module, is_quantized
from .state_rows import StateRows, States
from .step_chain import NotNative, StepChain, highest_step, run_native

__all__ = [
    "ARCHITECTURES",
    "CONFIDENCE_FEATURES",
    "KERNEL_DTYPES",
    "MAX_ATTENDED_ROWS",
    "Attend",
    "Backbone",
    "DenseAttention",
    "DraftVerifier",
    "Drawn",
    "EarlyExitModel",
    "ExitHead",
    "ExitHeadConfig",
    "FormTable",
    "FormTables",
    "HeadKind",
    "Highest",
    "Native",
    "NotNative",
    "Pages",
    "Places",
    "Pools",
    "ProductKind",
    "StateRows",
    "States",
    "StepChain",
    "base_of",
    "cache_folder",
    "capped_attention",
    "check_exit_layers",
    "context_position",
    "context_positions",
    "draft_features",
    "find_kernels",
    "head_kinds",
    "held_module",
    "highest_step",
    "is_quantized",
    "is_timed",
    "measure_forms",
    "num_features",
    "possible_forms",
    "run_native",
]
