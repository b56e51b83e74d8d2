"""Ways to draft besides a level that draws token by token, for methods in which the target verifies such drafts."""

from collections.abc import Sequence as Items
from typing import Protocol

import torch

from .adaptive_exits import AdaptiveExits
from .config import EngineConfig
from .levels import NGRAM_LEVEL
from .lookahead import Lookahead
from .model_runner import ModelRunner
from .ngram_proposer import NgramProposer, RowCost
from .policy import Policy
from .sequence import Sequence
from .sprinter import Sprinter, find_verifier
from .tree_verifier import TreeDrafter


class Proposer(Protocol):
    """Drafts for the target."""

    num_names: int
    """Names in the statistics that are its own, before those of the model's levels."""

    def propose(self, sequences: list[Sequence]) -> None:
        """Put at most `wanted[-1]` tokens into `proposed[-1]` of each sequence, which is empty, and count them.

        Which tokens, and how many, may depend on what was committed and proposed before and on the distributions that
        they are drawn from; a token that was drawn must be put there. A lossy method's may commit tokens by itself, and
        so finish sequences, which are then not verified.
        """


def build_proposer(
    config: EngineConfig,
    runner: ModelRunner,
    policies: Items[Policy],
    generator: torch.Generator,
    row_cost: RowCost | None = None,
) -> Proposer | None:
    """That of the method; None where its lowest level draws token by token, or nothing is drafted."""
    backbone = runner.model.backbone
    if config.method == "ngram":
        return NgramProposer(
            "draft",
            backbone.vocab_size,
            backbone.device,
            min_ngram=config.min_ngram,
            max_ngram=config.max_ngram,
            max_length=config.num_ngram_tokens,
            row_cost=row_cost,
        )
    if config.method == "adadecode":
        return AdaptiveExits(
            runner, policies[-1], generator, exit_confidence=config.exit_confidence, one_by_one=config.exact
        )
    if config.method == "sprinter":
        verifier = find_verifier(runner.model, runner.levels[0].stop)
        return Sprinter(runner, verifier, threshold=config.verifier_threshold)
    return None


def build_free_drafts(
    config: EngineConfig, runner: ModelRunner, policies: Items[Policy], row_cost: RowCost | None = None
) -> NgramProposer | None:
    """What takes rounds over from the exits; None where the engine is not asked to."""
    if not config.ngram_drafts:
        return None
    backbone = runner.model.backbone
    return NgramProposer(
        NGRAM_LEVEL,
        backbone.vocab_size,
        backbone.device,
        min_ngram=config.min_ngram,
        max_ngram=config.max_ngram,
        max_length=config.num_ngram_tokens,
        exit_layers=[level.stop for level in runner.levels[:-1]],
        num_layers=backbone.num_layers,
        policies=policies,
        row_cost=row_cost,
    )


def build_tree_drafter(config: EngineConfig) -> TreeDrafter | None:
    """That of a method in which the target verifies trees; None for all others."""
    if config.method == "lookahead":
        return Lookahead(
            num_columns=config.lookahead_window,
            ngram_size=config.lookahead_ngram,
            max_candidates=config.lookahead_candidates,
        )
    return None
