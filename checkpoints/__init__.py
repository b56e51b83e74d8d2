"""What lives on disk and on the hub: base models, adapters and training states."""

from .adapter import check_replaceable, load_adapter, save_adapter, shipped_adapter
from .atomic import write_atomically
from .base_model import load_base
from .provenance import base_source, fingerprint, heads_fingerprint, package_versions, run_record
from .push import check_push, push_adapter
from .training_state import TrainingState, load_training_state, save_training_state
from .verifier_file import load_verifier, save_verifier

__all__ = [
    "TrainingState",
    "base_source",
    "check_push",
    "check_replaceable",
    "fingerprint",
    "heads_fingerprint",
    "load_adapter",
    "load_base",
    "load_training_state",
    "load_verifier",
    "package_versions",
    "push_adapter",
    "run_record",
    "save_adapter",
    "save_training_state",
    "save_verifier",
    "shipped_adapter",
    "write_atomically",
]
