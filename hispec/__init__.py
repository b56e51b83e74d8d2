"""hispec: hierarchical speculative decoding with early-exit heads on Hugging Face causal LMs."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "EarlyExitModel",
    "Engine",
    "SamplingParams",
    "__version__",
    "hispec_generate",
    "load_adapter",
    "push_adapter",
    "save_adapter",
]

if TYPE_CHECKING:
    from .checkpoints import load_adapter, push_adapter, save_adapter
    from .heads import EarlyExitModel
    from .infer import AsyncEngine, Engine, SamplingParams, hispec_generate
else:
    # Public names are imported when first asked for: `import hispec` costs no torch import, so that a
    # command can print its help, or refuse a wrong flag, at once.
    _HOMES = {
        "AsyncEngine": ".infer",
        "EarlyExitModel": ".heads",
        "Engine": ".infer",
        "SamplingParams": ".infer",
        "hispec_generate": ".infer",
        "load_adapter": ".checkpoints",
        "push_adapter": ".checkpoints",
        "save_adapter": ".checkpoints",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
