"""A trained verifier decides which drafted tokens need no target (SPRINTER, Zhong et al. 2025, arXiv 2502.04557).

LOSSY: a token that the verifier trusts is committed at once, and the target never judges it. At the first token that
it doubts, or after a set number of trusted ones, the target runs once over all that it has not seen, judges the
doubted token and adds its own. What was committed stays, whatever the target would have said.
"""

from functools import partial

from ..checkpoints import load_verifier
from ..heads import CONFIDENCE_FEATURES, DraftVerifier, EarlyExitModel, num_features
from .config import SamplingParams
from .logits_reader import read_logits
from .model_runner import ModelRunner
from .sequence import Proposal, Sequence
from .stats import timed
from .transfer import to_device


class Sprinter:
    """Drafts with the first exit until a token is doubted, which is all that the target is asked to judge."""

    num_names = 0

    def __init__(
        self,
        runner: ModelRunner,
        verifier: DraftVerifier,
        *,
        threshold: float,  # a token that the base accepts with at least this probability is trusted
    ) -> None:
        self._runner = runner
        self._verifier = verifier
        self._threshold = threshold
        self._read = partial(read_logits, vocab_size=runner.model.backbone.vocab_size)

    def propose(self, sequences: list[Sequence]) -> None:
        """Commit what is trusted, which may end a text, and propose the token that is not; `wanted[-1]` in all."""
        name = self._runner.levels[0].name
        active, num_drafted = sequences, 0
        while active := [sequence for sequence in active if num_drafted < sequence.wanted[-1]]:
            with timed([sequence.stats.levels[name] for sequence in active]):
                active = self._draw(active)
            num_drafted += 1

    def _draw(self, sequences: list[Sequence]) -> list[Sequence]:
        """One more token for each; returns those whose token is trusted and does not end the text."""
        runner = self._runner
        runner.advance(0, sequences)
        bounds = [(sequence.num_known - 1, sequence.num_known) for sequence in sequences]
        state, logits = runner.score_exit(0, sequences, [start for start, _ in bounds])
        vocab_ids = runner.parts.vocab_ids(0)
        rows = self._read(logits, sequences, bounds, vocab_ids)
        ids = [token_id for row in rows for token_id in row.ids]
        # No comparison holds for NaN: a token from such a row is doubted.
        is_trusted = self._verifier(state, logits) >= self._threshold
        if any(sequence.logits_processor is not None for sequence in sequences):
            # Of a token that a penalty or a ban has put in the place of the exit's own, the verifier knows nothing.
            own = logits.argmax(-1)
            is_trusted &= to_device(ids, own.device) == (own if vocab_ids is None else vocab_ids[own])
        going_on = []
        for sequence, token_id, trusted in zip(sequences, ids, is_trusted.tolist(), strict=True):
            sequence.stats.levels[runner.levels[0].name].num_rounds += 1
            if not trusted:
                sequence.proposed[-1].append(Proposal(token_id, None, 1.0, 0))
                continue
            sequence.commit([token_id])
            sequence.origins.append(0)
            sequence.stats.num_skipped += 1
            if sequence.finish_reason is None:
                going_on.append(sequence)
        return going_on


def find_verifier(model: EarlyExitModel, exit_layer: int) -> DraftVerifier:
    """The model's verifier, or that of its adapter; ValueError, with the remedy, where none fits the exit."""
    if (verifier := model.verifier) is None:
        if model.adapter_folder is None:
            raise ValueError(
                "method 'sprinter' needs a verifier, and the model's heads come from no adapter that could hold one; "
                "save them, fit one (python -m hispec.train.sprinter --adapter FOLDER --responses FILE), and load them"
            )
        verifier = load_verifier(model.adapter_folder)
    widths = (len(CONFIDENCE_FEATURES), num_features(model.backbone.hidden_size))
    if verifier.exit_layer != exit_layer or len(verifier.weight) not in widths:
        raise ValueError(
            f"the verifier was fitted to an exit at layer {verifier.exit_layer} with {len(verifier.weight)} features, "
            f"but exit {exit_layer} drafts, with {widths[0]} or {widths[1]}; draft with that exit (exit_layers), or "
            f"fit another verifier: python -m hispec.train.sprinter --exit-layer {exit_layer}"
        )
    return verifier


def check_served(params: SamplingParams) -> None:
    """Raise ValueError for what only the target could answer."""
    if not params.is_greedy:
        raise ValueError(
            f"temperature is {params.temperature}, but method 'sprinter' decodes greedily alone, which is what its "
            "verifier was fitted to; set temperature 0, or choose another method"
        )
    if params.logprobs is not None:
        raise ValueError(
            "logprobs are the model's own, which method 'sprinter' does not ask about every token; leave them out, or "
            "choose another method"
        )
