"""The loss as a recipe writes it: one name, or a sum such as `forward_kl + 0.5*total_variation`."""

from typing import Literal, get_args

LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "cross_entropy",
    "total_variation",
    "log_acceptance",
    "adaptive_acceptance",
    "acceptance_length",
]


def parse_loss(text: str) -> dict[str, float]:
    """The weight of every loss in a sum of `name` and `weight*name`, in the order of the text.

    Raises ValueError, naming the term, for an unknown or repeated name and for a weight that is not above 0.
    """
    weights: dict[str, float] = {}
    for term in text.split("+"):
        weight, star, name = term.rpartition("*")
        name = name.strip()
        if name not in get_args(LossName):
            raise ValueError(
                f"the loss {text!r} has a term {term.strip()!r}; write a sum of terms like forward_kl or "
                f"0.5*total_variation, of {', '.join(get_args(LossName))}"
            )
        if name in weights:
            raise ValueError(f"the loss {text!r} names {name} twice; add the two weights")
        weights[name] = _weight(weight, text) if star else 1.0
    return weights


def _weight(weight: str, text: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = float("nan")
    # Written so that NaN fails as well.
    if not 0 < value < float("inf"):
        raise ValueError(f"the loss {text!r} has the weight {weight.strip()!r}; it must be a number above 0")
    return value
