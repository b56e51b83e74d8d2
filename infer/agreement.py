"""Where a model's exits are right on texts that it wrote itself, scored at every distance to the last commit.

T tokens of whole texts side by side; R rows of one answer, each of which chooses the next token; D distances; N rows;
V vocabulary; V_d draft vocabulary; H hidden size.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..heads import DenseAttention, EarlyExitModel, context_positions
from .course import Kept

NUM_DISTANCES = 8
CHUNK_TOKENS = 2048
CHUNK_ROWS = 256


class Text(NamedTuple):
    """A prompt and the model's own answer to it."""

    prompt_ids: list[int]
    token_ids: list[int]


@torch.inference_mode()
def score_texts(
    model: EarlyExitModel,
    texts: Items[Text],
    temperature: float,  # that the answers were sampled at; 0 is greedy
    *,
    show_progress: bool = False,
) -> Iterator[dict[tuple[int, int], Kept]]:
    """Of each answer, by (exit layer, deeper exit layer or depth of the base): where what the one proposes is kept.

    Greedy: where both find the same token likeliest. Sampled: a coin falls for every row. That a token x of the answer,
    drawn by the model with the probability p(x), was accepted from q has the probability min(1, q(x) / p(x)); so the
    coins of an exit against the target, and of a shallower exit against that exit where its token is kept, follow the
    answer's own tokens, and others the expected acceptance, the sum of min(q, p).
    """
    generator = torch.Generator().manual_seed(0)
    with tqdm(total=len(texts), unit="text", desc="score", disable=not show_progress) as bar:
        for part in _chunks(texts):
            yield from _score(model, part, temperature, generator)
            bar.update(len(part))


def _chunks(texts: Items[Text]) -> Iterator[list[Text]]:
    part: list[Text] = []
    for text in texts:
        part.append(text)
        if sum(len(each.prompt_ids) + len(each.token_ids) for each in part) >= CHUNK_TOKENS:
            yield part
            part = []
    if part:
        yield part


def _score(
    model: EarlyExitModel, texts: list[Text], temperature: float, generator: torch.Generator
) -> Iterator[dict[tuple[int, int], Kept]]:
    """Texts that are read side by side."""
    backbone, depth = model.backbone, model.backbone.num_layers
    lengths = [len(text.prompt_ids) + len(text.token_ids) for text in texts]
    ids = torch.tensor([token for text in texts for token in (*text.prompt_ids, *text.token_ids)])
    positions = torch.cat([torch.arange(length) for length in lengths]).to(backbone.device)
    firsts = torch.tensor([sum(lengths[:index]) for index in range(len(lengths))])
    begins = torch.tensor([len(text.prompt_ids) for text in texts])
    attend = DenseAttention(lengths)
    hidden = backbone.embed(ids.to(backbone.device), positions)
    exits: list[Tensor] = []
    start = 0
    for stop in (*model.exit_layers, depth):
        hidden = backbone.run_layers(hidden, start, stop, positions, attend)
        exits.append(hidden)
        start = stop
    final = backbone.final_norm(exits.pop())
    row_counts = [max(0, len(text.token_ids) - 1) for text in texts]
    spans = zip((firsts + begins).tolist(), row_counts, strict=True)
    rows = torch.cat([torch.arange(first, first + number) for first, number in spans]).to(backbone.device)
    if not len(rows):
        return
    counts = torch.tensor(lengths)
    scorer = _Scorer(model, final[0, rows], ids.to(backbone.device)[rows + 1], temperature, generator)
    found: list[dict[tuple[int, int], Tensor]] = []
    has_context = any(head.config.committed_context for head in model.exit_heads)
    for distance in range(1, (NUM_DISTANCES if has_context else 1) + 1):
        # An answer's first token was committed with the prompt: nothing before it is ever unknown.
        known = torch.maximum(positions.cpu() - distance, (begins - 1).repeat_interleave(counts))
        context = _context(final[0], context_positions(positions, known.to(positions.device)), firsts, counts)
        states = [
            head(exits[index], context, positions, attend)[0, rows] for index, head in enumerate(model.exit_heads)
        ]
        found.append(scorer.kept(states))
    parts = [{hop: kept.split(row_counts) for hop, kept in each.items()} for each in found]
    for number in range(len(texts)):
        yield {hop: [each[hop][number].tolist() for each in parts] for hop in parts[0]}


def _context(
    final: Tensor,  # [T, H]
    known: Tensor,  # [T] int64, within each text; -1 is none
    firsts: Tensor,  # [B] int64, rows with which texts begin
    counts: Tensor,  # [B] int64, rows of the texts
) -> Tensor:  # [1, T, H]
    rows = firsts.repeat_interleave(counts).to(final.device) + known.clamp_min(0)
    return torch.where((known < 0).unsqueeze(-1), 0, final[rows]).unsqueeze(0)


class _Scorer:
    """Compares levels on the same rows."""

    def __init__(
        self,
        model: EarlyExitModel,
        final: Tensor,  # [N, H]
        next_ids: Tensor,  # [N] int64, what the model chose there
        temperature: float,
        generator: torch.Generator,
    ) -> None:
        self._model, self._final, self._next_ids = model, final, next_ids
        self._temperature, self._generator = temperature, generator
        self._levels = (*model.exit_layers, model.backbone.num_layers)

    def kept(self, states: list[Tensor]) -> dict[tuple[int, int], Tensor]:
        """From the states of every exit `[N, H]`, by hop: `[N]` bool, on the host."""
        chunks: dict[tuple[int, int], list[Tensor]] = {hop: [] for hop in combinations(self._levels, 2)}
        compare = self._same_choice if self._temperature == 0 else self._coins
        for start in range(0, len(self._final), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            for hop, kept in compare([state[part] for state in states], part).items():
                chunks[hop].append(kept.cpu())
        return {hop: torch.cat(parts) for hop, parts in chunks.items()}

    def _same_choice(self, states: list[Tensor], part: slice) -> dict[tuple[int, int], Tensor]:
        tops = [self._top(index, state) for index, state in enumerate(states)] + [self._next_ids[part]]
        chosen = dict(zip(self._levels, tops, strict=True))
        return {(a, b): chosen[a] == chosen[b] for a, b in combinations(self._levels, 2)}

    def _coins(self, states: list[Tensor], part: slice) -> dict[tuple[int, int], Tensor]:
        logits = self._model.backbone.logits(self._final[part])
        rows = [self._probs(index, state) for index, state in enumerate(states)]
        probs = dict(zip(self._levels, [*rows, (logits.float() / self._temperature).softmax(-1)], strict=True))
        own = self._next_ids[part].unsqueeze(-1)
        likely = {level: row.gather(-1, own).squeeze(-1) for level, row in probs.items()}
        depth = self._levels[-1]
        found = {(a, depth): self._fall(likely[a] / likely[depth]) for a in self._levels[:-1]}
        for a, b in combinations(self._levels[:-1], 2):
            followed = self._fall(likely[a] / likely[b].clamp_min(1e-30))
            others = self._fall(torch.minimum(probs[a], probs[b]).sum(-1))
            found[a, b] = torch.where(found[b, depth], followed, others)
        return {hop: found[hop] for hop in combinations(self._levels, 2)}

    def _fall(self, chances: Tensor) -> Tensor:
        return torch.rand(chances.shape, generator=self._generator).to(chances.device) < chances

    def _top(self, index: int, state: Tensor) -> Tensor:  # [N] int64
        top = self._model.exit_logits(index, state).argmax(-1)
        ids = self._model.exit_heads[index].draft_vocab_ids
        return top if ids is None else ids[top]

    def _probs(self, index: int, state: Tensor) -> Tensor:  # [N, V] float32
        probs = (self._model.exit_logits(index, state).float() / self._temperature).softmax(-1)
        ids = self._model.exit_heads[index].draft_vocab_ids
        if ids is None:
            return probs
        return probs.new_zeros(len(probs), self._model.backbone.vocab_size).index_copy_(1, ids, probs)
