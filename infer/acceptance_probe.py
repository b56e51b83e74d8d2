"""How often each exit is right on given prompts: the model answers them, and every setting goes through its answers."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ..heads import EarlyExitModel
from .agreement import Text, score_texts
from .config import SamplingParams
from .cost_model import Acceptance
from .replay import replay

if TYPE_CHECKING:
    from .engine import Engine


def measure_acceptance(
    model: EarlyExitModel,
    build_engine: "Callable[..., Engine]",  # as `Engine`: from a model and options
    prompts: Items[list[int]],  # token ids
    params: SamplingParams,  # all that changes the choice of a token but the temperature is left out of the scores
    *,
    max_num_seqs: int = 16,
    show_progress: bool = False,
) -> Acceptance:
    """Answer the prompts without drafts, then score every exit on the answers.

    Raises ValueError where too few tokens come together.
    """
    if not model.heads:
        return Acceptance(hops={})
    engine = build_engine(model, method="autoregressive", max_num_seqs=max_num_seqs)
    answers = engine.generate(prompts, params, progress=show_progress)
    texts = [Text(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    kept = score_texts(model, texts, params.temperature, show_progress=show_progress)
    found = replay(kept, model.exit_layers, model.backbone.num_layers)
    if found is None:
        raise ValueError(
            f"the prompts led to {sum(len(text.token_ids) for text in texts)} tokens, too few to measure by; give more "
            "of them, or longer answers"
        )
    return found
