"""Registers exit heads with peft as soon as somebody imports it, so that `import hispec` need not."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _PeftFinder:
    """Finds peft as the finders behind it do, and registers once it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`; None for all other modules."""
        if name != "peft":
            return None
        place = sys.meta_path.index(self)
        for finder in sys.meta_path[place + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _PeftLoader(spec.loader)
                    spec.loader = loader
                return spec
        return None


class _PeftLoader:
    """A loader that registers exit heads after the module has run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Run peft, then register."""
        self._loader.exec_module(module)
        register()


def register_with_peft() -> None:
    """Register now where peft is imported already, and otherwise when it is."""
    if "peft" in sys.modules:
        register()
    elif not any(isinstance(finder, _PeftFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PeftFinder())


def register() -> None:
    """Register; a warning where this version of peft cannot take exit heads."""
    try:
        importlib.import_module("hispec.checkpoints.peft_method")
    except Exception as error:
        version = getattr(sys.modules.get("peft"), "__version__", "of unknown version")
        reason = " ".join(str(error).split())[:200]
        warnings.warn(
            f"peft {version} does not take exit heads ({type(error).__name__}: {reason}): PeftModel cannot load them. "
            "hispec.load_adapter can; or install the version of peft in hispec's constraints.txt",
            stacklevel=2,
        )
