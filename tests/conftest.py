"""Fixtures: tiny random models."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from .models import ARCHITECTURE_NAMES, build_base


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
