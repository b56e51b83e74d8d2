"""What lives on disk and on the hub: base models, adapters and training states."""

from .adapter import load_adapter, save_adapter, shipped_adapter
from .atomic import write_atomically
from .base_model import load_base
from .provenance import base_source, fingerprint, package_versions, run_record
from .training_state import TrainingState, load_training_state, save_training_state

__all__ = [
    "TrainingState",
    "base_source",
    "fingerprint",
    "load_adapter",
    "load_base",
    "load_training_state",
    "package_versions",
    "run_record",
    "save_adapter",
    "save_training_state",
    "shipped_adapter",
    "write_atomically",
]
