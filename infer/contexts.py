"""How long the texts of a batch are while costs are measured. Integers only."""

SHORTEST, LONGEST = 0.5, 1.5
"""Of the mean. Texts that differ by so much are attended in several calls (see `MAX_STRETCH` of attention), which a
batch of equal ones would hide; those of a real batch differ by as much."""


def spread_contexts(context: int, batch_size: int) -> list[int]:
    """Tokens of each text of a batch whose mean is `context`, evenly spread; at least one."""
    if batch_size == 1:
        return [context]
    step = (LONGEST - SHORTEST) / (batch_size - 1)
    return [max(1, round(context * (SHORTEST + step * place))) for place in range(batch_size)]
