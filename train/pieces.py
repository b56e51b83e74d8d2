"""Pieces: what is longer than the longest sequence, cut so that no answer is lost."""

from .chat_spans import Tokens


def fit_answers(
    tokens: Tokens,
    max_length: int,
    num_lead: int,  # first tokens that every piece keeps, such as the beginning-of-sequence token
) -> list[Tokens]:
    """Pieces of at most `max_length` tokens that hold every answer token once, with as much before as fits.

    One piece where the answers, from the first to the last, leave room for one token before them: then only the
    beginning of the prompt is gone.
    """
    if len(tokens.token_ids) <= max_length:
        return [tokens]
    room = max_length - num_lead - 1
    parts = [(place, min(stop, place + room)) for start, stop in tokens.spans for place in range(start, stop, room)]
    groups: list[list[tuple[int, int]]] = []
    for part in parts:
        if groups and part[1] - groups[-1][0][0] <= room:
            groups[-1].append(part)
        else:
            groups.append([part])
    pieces = []
    for group in groups:
        stop = group[-1][1]
        begin = max(num_lead, stop - max_length + num_lead)
        token_ids = tokens.token_ids[:num_lead] + tokens.token_ids[begin:stop]
        shift = num_lead - begin
        pieces.append(Tokens(token_ids=token_ids, spans=[(start + shift, stop + shift) for start, stop in group]))
    return pieces


def cut_text(tokens: Tokens, max_length: int, num_lead: int) -> list[Tokens]:
    """Pieces of at most `max_length` tokens that lie side by side; all but a piece's first token is trained on."""
    lead, rest = tokens.token_ids[:num_lead], tokens.token_ids[num_lead:]
    pieces = []
    for start in range(0, len(rest), max_length - num_lead):
        token_ids = lead + rest[start : start + max_length - num_lead]
        pieces.append(Tokens(token_ids=token_ids, spans=[(1, len(token_ids))]))
    return pieces
