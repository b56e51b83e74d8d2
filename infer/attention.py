"""Attention of a packed batch over the paged cache.

T new tokens of B sequences side by side; H query heads, Hkv key heads, G = H / Hkv, Dh head size. A span is the new
tokens of one sequence; spans of few tokens are attended together, padded to the longest, a long span by itself.
"""

import itertools
from collections.abc import Sequence as Items
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..heads import KERNEL_DTYPES, MAX_ATTENDED_ROWS, Pages, Places, capped_attention, find_kernels
from .exact_attention import exact_attention
from .kv_cache import KVCache
from .token_tree import TokenTree, tree_mask
from .transfer import to_device
from .varlen_attention import VarlenLayout, varlen_attention, varlen_layout, varlen_numbers, varlen_shape

MAX_PADDED = 16
"""Spans of at most this many tokens are padded and attended together."""
MAX_STRETCH = 1.5
"""... if the longest context among them is at most this many times the shortest."""


class Span(NamedTuple):
    """The new tokens of one sequence in a packed batch: positions `[start, stop)`."""

    block_table: list[int]
    start: int
    stop: int


class _Group(NamedTuple):
    """Spans attended by one call."""

    rows: Tensor | slice  # [B * Q] or all, where the queries lie in the packed batch
    spans: list[Span]
    num_queries: int  # Q, of the longest span
    place: slice | Tensor  # where the keys lie: slots if it is a lone span in one piece, else blocks [B, n]
    indices: list[int]  # of the spans in the packed batch


class IsKept(Exception):  # noqa: N818  nothing has gone wrong
    """Keys and values are in the cache, and nothing else of the layer was wanted."""


class KeepOnly:
    """An `Attend` that keeps keys and values and ends the layer there, by `IsKept`."""

    def __init__(self, attend: "PagedAttention") -> None:
        self._attend = attend

    def __call__(
        self,
        kv_layer: int,
        query: Tensor,  # [T, H, Dh]
        key: Tensor,  # [T, Hkv, Dh]
        value: Tensor,  # [T, Hkv, Dh]
        **options: Any,  # of the scores, which nobody asks for
    ) -> NoReturn:
        """See `Attend`."""
        self._attend.write(kv_layer, key, value)
        raise IsKept


class PagedAttention:
    """An `Attend` for one forward pass: writes the new keys and values, attends over all up to each position.

    With `is_exact` by `exact_attention`: bit for bit the same for a query in whatever batch it comes. With a `layout`
    by the GPU's paged kernel, see `can_use_varlen`, but for scores that are capped; without spans it is all there is,
    and blocks that are new are cleared by `KVCache.clear` before. With `trees`, one for each span, the new tokens are
    their nodes, which lie in the span's slots one behind the other: a node sees what is before the span and its
    ancestors. Their positions are the caller's, and no other kernel takes them.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        spans: list[Span],
        device: torch.device,
        *,
        is_exact: bool = False,
        layout: VarlenLayout | None = None,
        trees: Items[TokenTree] | None = None,
    ) -> None:
        assert layout is None or trees is None
        self._trees = trees
        self._kv_cache = kv_cache
        self._spans = spans
        self._is_exact = is_exact
        self._device = device
        self._layout = layout
        self._masks: dict[tuple[int, int | None, int, torch.dtype], Tensor] = {}
        num_rows = sum(span.stop - span.start for span in spans)
        is_plain = not is_exact and layout is None and trees is None and device.type == "cpu"
        self._kernels = find_kernels() if is_plain and 0 < num_rows <= MAX_ATTENDED_ROWS else None

    @classmethod
    def of_places(
        cls,
        kv_cache: KVCache,
        places: Places,
        new_blocks: Tensor,  # int64, whose first token is among the new ones: their number, and they
        num_positions: int,  # more than any of them
    ) -> "PagedAttention":
        """What our own kernels take of it, and nothing else: rows that these numbers say when it is used."""
        attend = cls(kv_cache, [], places.tensors[0].device)
        attend.pages = Pages(kv_cache.pools, places, new_blocks)
        attend.num_positions = num_positions
        return attend

    def __call__(
        self,
        kv_layer: int,
        query: Tensor,  # [T, H, Dh]
        key: Tensor,  # [T, Hkv, Dh]
        value: Tensor,  # [T, Hkv, Dh]
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [T, H, Dh]
        """See `Attend`."""
        pages = self.pages if softcap is None else None
        dtypes = {query.dtype, key.dtype, value.dtype}
        if self._kernels is not None and pages is not None and dtypes == {pages.pools.dtype}:
            self._clear(kv_layer)
            pools = self._kv_cache.keys[kv_layer], self._kv_cache.values[kv_layer]
            return self._kernels.paged_attention(
                query, key, value, *pools, self._places, scaling=scaling, window=window
            )
        self.write(kv_layer, key, value)
        if self._layout is not None and softcap is None:
            pools = self._kv_cache.blocks(kv_layer)
            return varlen_attention(query, *pools, self._layout, scaling=scaling, window=window)
        if not self._spans:
            raise NotImplementedError("the paged kernel does not cap scores")
        if len(self._groups) == 1 and isinstance(self._groups[0].rows, slice):
            return self._attend(0, kv_layer, query, scaling, window, softcap)
        output = torch.empty_like(query)
        for index, group in enumerate(self._groups):
            output[group.rows] = self._attend(index, kv_layer, query[group.rows], scaling, window, softcap)
        return output

    @cached_property
    def num_positions(self) -> int | None:
        """See `Attend`; None where the host does not know."""
        return max((span.stop for span in self._spans), default=None)

    @cached_property
    def pages(self) -> Pages | None:
        """See `Attend`; None where they do not serve."""
        if self._kernels is None or self._kv_cache.pools.dtype not in KERNEL_DTYPES:
            return None
        blocks = new_block_ids(self._spans, self._kv_cache.block_size)
        return Pages(
            self._kv_cache.pools, self._places, torch.tensor([len(blocks), *blocks], device="cpu") if blocks else None
        )

    def write(self, kv_layer: int, key: Tensor, value: Tensor) -> None:  # [T, Hkv, Dh] each
        """Keep the new tokens' keys and values."""
        self._clear(kv_layer)
        self._kv_cache.write(kv_layer, self._slots, key, value)

    def place_numbers(self) -> list[int]:
        """What `prepare` is to be given on the device."""
        if self._kernels is None:
            return []
        spans = self._spans
        sequences = [number for number, span in enumerate(spans) for _ in range(span.start, span.stop)]
        positions = [position for span in spans for position in range(span.start, span.stop)]
        num_blocks = max(len(span.block_table) for span in spans)
        tables = [block for span in spans for block in span.block_table + [0] * (num_blocks - len(span.block_table))]
        return [*sequences, *positions, *tables]

    def prepare(self, numbers: Tensor | None = None) -> None:
        """Take from the host now what the layers will ask for; of it `numbers`, those of `place_numbers`, are taken."""
        _ = self._new_blocks
        if self._kernels is not None:
            if numbers is not None:
                self._places = self._read_places(numbers)
            return
        _ = self._slots
        if self._layout is None and self._trees is None:
            _ = self._ends

    def _clear(self, kv_layer: int) -> None:
        if self._new_blocks is not None:
            self._kv_cache.clear(kv_layer, self._new_blocks)

    @cached_property
    def _places(self) -> Places:
        return self._read_places(torch.tensor(self.place_numbers()))

    def _read_places(self, numbers: Tensor) -> Places:
        num_rows = sum(span.stop - span.start for span in self._spans)
        sequences, positions, tables = numbers.tensor_split([num_rows, 2 * num_rows])
        return Places.of(sequences, positions, tables.view(len(self._spans), -1), self._kv_cache.block_size)

    @cached_property
    def _slots(self) -> Tensor | slice:
        return (
            _slots(self._spans, self._kv_cache.block_size, self._device) if self._layout is None else self._layout.slots
        )

    @cached_property
    def _new_blocks(self) -> Tensor | None:
        return new_blocks(self._spans, self._kv_cache.block_size, self._device)

    @cached_property
    def _groups(self) -> list[_Group]:
        # Trees are of about one size, and none is a long text.
        max_padded = MAX_PADDED if self._trees is None else max(map(len, self._trees))
        return _group(self._spans, self._kv_cache.block_size, self._device, max_padded)

    @cached_property
    def _ends(self) -> list[tuple[Tensor, Tensor] | tuple[int, int]]:  # [B, 1, 1] each
        """Of each group: the first and the last position of its new tokens."""
        ends: list[tuple[Tensor, Tensor] | tuple[int, int]] = []
        for group in self._groups:
            first, last = [span.start for span in group.spans], [span.stop - 1 for span in group.spans]
            if len(first) == 1:
                ends.append((first[0], last[0]))
            else:
                firsts, lasts = to_device(first + last, self._device).view(2, -1, 1, 1)
                ends.append((firsts, lasts))
        return ends

    def _attend(
        self, index: int, kv_layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:  # [B * Q, H, Dh]
        group = self._groups[index]
        num_seqs, num_queries = len(group.spans), group.num_queries
        keys, values = self._kv_cache.read(kv_layer, group.place)  # [B, Hkv, S, Dh]
        num_heads, head_dim = query.shape[1:]
        num_kv_heads, num_keys = keys.shape[1:3]
        is_whole = num_seqs == 1 and num_queries == num_keys > 1 and (window is None or num_keys <= window)
        if is_whole and softcap is None and not self._is_exact and self._trees is None:
            output = F.scaled_dot_product_attention(
                query.transpose(0, 1).unsqueeze(0),
                keys,
                values,
                is_causal=True,
                scale=scaling,
                enable_gqa=num_heads > num_kv_heads,
            )
            return output[0].transpose(0, 1)
        # The heads that share a key head are folded into its queries: no key is repeated.
        groups = num_heads // num_kv_heads
        folded_shape = (num_seqs, num_kv_heads, num_queries * groups, head_dim)
        if num_queries == 1:
            folded = query.view(folded_shape)
        else:
            parts = query.view(num_seqs, num_queries, num_kv_heads, groups, head_dim)
            folded = parts.transpose(1, 2).reshape(folded_shape)
        # Scaled dot products take what they add to the scores: given a mask, they would make that anew at every layer.
        dtype = query.dtype if softcap is None and not self._is_exact else torch.bool
        mask = self._mask(index, window, groups, num_keys, dtype)
        if self._is_exact:
            output = exact_attention(folded, keys, values, mask, scaling=scaling, softcap=softcap)
        elif softcap is None:
            output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        else:
            output = capped_attention(folded, keys, values, mask, scaling=scaling, softcap=softcap)
        if num_queries > 1:
            output = output.view(num_seqs, num_kv_heads, num_queries, groups, head_dim).transpose(1, 2)
        return output.reshape(query.shape)

    def _mask(
        self, index: int, window: int | None, groups: int, num_keys: int, dtype: torch.dtype
    ) -> Tensor | None:  # [B, 1, Q * G, S], True where a query sees a key; of a floating dtype 0 there, elsewhere -inf
        group = self._groups[index]
        is_whole = len(group.spans) == 1 and num_keys == group.spans[0].stop
        if is_whole and group.num_queries == 1 and (window is None or num_keys <= window):
            return None
        if (index, window, groups, dtype) not in self._masks:
            mask = (
                self._seen_by_place(index, window, num_keys)
                if self._trees is None
                else self._seen_in_trees(group, window, num_keys)
            )
            mask = mask.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2).unsqueeze(1)
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=self._device).masked_fill_(~mask, -torch.inf)
            self._masks[index, window, groups, dtype] = mask
        return self._masks[index, window, groups, dtype]

    def _seen_by_place(self, index: int, window: int | None, num_keys: int) -> Tensor:  # [B, Q, S] bool
        first, last = self._ends[index]
        places = torch.arange(self._groups[index].num_queries, device=self._device)[None, :, None]
        query_positions = (places + first).clamp(max=last)
        key_positions = torch.arange(num_keys, device=self._device)
        mask = key_positions <= query_positions
        if window is not None:
            mask &= key_positions > query_positions - window
        return mask

    def _seen_in_trees(self, group: _Group, window: int | None, num_keys: int) -> Tensor:  # [B, Q, S] bool
        assert self._trees is not None
        trees = [self._trees[index] for index in group.indices]
        starts = [span.start for span in group.spans]
        return to_device(torch.from_numpy(tree_mask(trees, starts, group.num_queries, num_keys, window)), self._device)


@torch.inference_mode()
def can_use_varlen(kv_cache: KVCache, num_heads: int) -> bool:
    """Whether this machine's paged kernel takes a cache of these shapes and gives what scaled dot products give.

    Tried, for what it takes depends on the GPU and on torch: no float32, some only blocks of 256 tokens.
    """
    pool, size = kv_cache.keys[0], kv_cache.block_size
    if pool.device.type != "cuda":
        return False
    num_kv_heads, head_dim = pool.shape[1:]
    tried = KVCache(1, 3, size, num_kv_heads, head_dim, pool.dtype, pool.device)
    spans = [Span([2], 0, min(5, size)), Span([1, 0], size - 1, size + 2)]
    num_rows = sum(span.stop - span.start for span in spans)
    generator = torch.Generator(pool.device).manual_seed(0)
    query, key, value, *pools = (
        torch.randn(*shape, head_dim, generator=generator, device=pool.device).to(pool.dtype)
        for shape in [(num_rows, num_heads), *[(num_rows, num_kv_heads)] * 2, *[(3 * size, num_kv_heads)] * 2]
    )
    tried.keys[0].copy_(pools[0])
    tried.values[0].copy_(pools[1])
    layout = build_layout(spans, size, pool.device)
    try:
        for window in (None, 3):
            options = {"scaling": head_dim**-0.5, "window": window, "softcap": None}
            expected, output = (
                PagedAttention(tried, spans, pool.device, layout=by)(0, query, key, value, **options)
                for by in (None, layout)
            )
            torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError):
        return False
    return True


def build_layout(spans: list[Span], block_size: int, device: torch.device) -> VarlenLayout:
    """The layout of these spans and of nothing else."""
    shape = varlen_shape(spans, block_size)
    return varlen_layout(to_device(varlen_numbers(spans, block_size, shape, 0), device), block_size, shape)


def _slots(spans: list[Span], block_size: int, device: torch.device) -> Tensor | slice:
    """Where the new tokens go."""
    if len(spans) == 1 and (run := _consecutive(spans[0], block_size)) is not None:
        return slice(run.start + spans[0].start, run.stop)
    slots = [_slots_of(span, np.arange(span.start, span.stop), block_size) for span in spans]
    return to_device(torch.from_numpy(np.concatenate(slots)), device)


def new_blocks(spans: list[Span], block_size: int, device: torch.device) -> Tensor | None:
    """As `new_block_ids`; None where there are none."""
    blocks = new_block_ids(spans, block_size)
    return to_device(blocks, device) if blocks else None


def new_block_ids(spans: list[Span], block_size: int) -> list[int]:
    """Blocks whose first token is among the new ones."""
    return [
        block
        for span in spans
        for block in span.block_table[-(-span.start // block_size) : -(-span.stop // block_size)]
    ]


def _key_place(spans: list[Span], block_size: int, device: torch.device) -> Tensor | slice:
    """Where all keys of the spans lie; short ones are padded to `[B, n]` blocks."""
    if len(spans) == 1 and (run := _consecutive(spans[0], block_size)) is not None:
        return run
    num_blocks = max(-(-span.stop // block_size) for span in spans)
    # Padding reads a block of the sequence's own: masked, but it must be numbers (0 * NaN is NaN).
    tables = [span.block_table[: -(-span.stop // block_size)] for span in spans]
    return torch.tensor([table + table[:1] * (num_blocks - len(table)) for table in tables], device=device)


def _slots_of(span: Span, positions: np.ndarray, block_size: int) -> np.ndarray:
    return np.asarray(span.block_table)[positions // block_size] * block_size + positions % block_size


def _consecutive(span: Span, block_size: int) -> slice | None:
    """The slots of positions `[0, stop)` where the span's blocks lie in one piece."""
    num_blocks = -(-span.stop // block_size)
    first = span.block_table[0]
    if span.block_table[:num_blocks] != list(range(first, first + num_blocks)):
        return None
    return slice(first * block_size, first * block_size + span.stop)


def _members(spans: list[Span], max_padded: int) -> list[list[int]]:
    """Which spans go together: short ones of about the same context, so that little of it is padding."""
    members = [[index] for index, span in enumerate(spans) if span.stop - span.start > max_padded]
    short = [index for index, span in enumerate(spans) if span.stop - span.start <= max_padded]
    longest = 0.0
    for index in sorted(short, key=lambda index: spans[index].stop):
        if spans[index].stop > longest:
            members.append([])
            longest = spans[index].stop * MAX_STRETCH
        members[-1].append(index)
    return members


def _group(spans: list[Span], block_size: int, device: torch.device, max_padded: int) -> list[_Group]:
    lengths = [span.stop - span.start for span in spans]
    first_rows = [0, *itertools.accumulate(lengths)]
    groups = []
    for indices in _members(spans, max_padded):
        chosen = [spans[index] for index in indices]
        num_queries = max(lengths[index] for index in indices)
        rows: Tensor | slice
        if len(indices) == 1:
            rows = slice(first_rows[indices[0]], first_rows[indices[0]] + num_queries)
        elif indices == list(range(len(spans))) and min(lengths) == num_queries:
            rows = slice(None)
        else:
            # A short span repeats its last row: the same value is computed, and written, more than once.
            rows = torch.tensor(
                [first_rows[i] + min(query, lengths[i] - 1) for i in indices for query in range(num_queries)],
                device=device,
            )
        groups.append(_Group(rows, chosen, num_queries, _key_place(chosen, block_size, device), indices))
    return groups
