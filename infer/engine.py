"""The engine: prompts in, completions out."""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints import load_adapter, load_base, shipped_adapter
from ..heads import EarlyExitModel
from ..recipes import resolve_model
from .block_manager import BlockManager
from .config import EngineConfig, SamplingParams
from .detokenizer import Detokenizer, decode
from .exact import build_exact
from .hierarchy import Hierarchy
from .kv_cache import KVCache, bytes_per_token
from .model_runner import Level, ModelRunner
from .scheduler import Scheduler
from .sequence import FinishReason, Sequence
from .stats import Stats

Prompt = str | Items[int] | Items[dict[str, Any]]
"""Raw text, token ids, or chat messages (`{"role", "content"}`) for the model's template."""

MEMORY_SHARE = 0.25
"""Of the machine's memory, what the KV cache takes at most when `num_blocks` is not given."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished generation."""

    request_id: int
    """As `add_request` returned it."""
    prompt_token_ids: list[int]
    """The prompt as the model read it."""
    token_ids: list[int]
    """The generated tokens, the token that ended the text included."""
    text: str | None
    """The generated tokens as text, without special tokens; None for an engine without a tokenizer."""
    finish_reason: FinishReason
    """`stop`: the text ended; `length`: the limit or the context was reached."""
    stats: Stats
    """What this generation took."""


class Delta(NamedTuple):
    """What one step added to a streamed generation."""

    text: str
    token_ids: list[int]


class Engine:
    """Generates with `model`'s own output, sooner: the exits draft, the full depth decides.

    Options are those of `EngineConfig`. Raises ValueError where the model has too few heads for the method, or cannot
    run in exact mode here.
    """

    def __init__(self, model: EarlyExitModel, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = EngineConfig(**options)
        backbone = model.backbone
        levels = _levels(model, self.config.method)
        if _should_pack(self.config, model):
            model.pack_weights()
        lengths = [0] + [self.config.num_draft_tokens] * (len(levels) - 1)
        max_proposed = lengths[-1]
        if self.config.method == "hispec":
            lengths[-1] = self.config.num_provisional_tokens
            # One short of enough, the intermediate level verifies a whole draft more and adds its token.
            max_proposed = self.config.num_provisional_tokens + self.config.num_draft_tokens
        num_cache_layers = backbone.num_layers + len(model.heads)
        cache_shape = (num_cache_layers, backbone.num_kv_heads, backbone.head_dim)
        num_blocks = self.config.num_blocks or _default_num_blocks(
            self.config, backbone.max_context, bytes_per_token(*cache_shape, backbone.dtype), backbone.device
        )
        kv_cache = KVCache(
            num_cache_layers,
            num_blocks,
            self.config.block_size,
            backbone.num_kv_heads,
            backbone.head_dim,
            backbone.dtype,
            backbone.device,
        )
        # The window holds a round's positions, the newest token, and the one whose context reaches one further back.
        is_exact = self.config.exact
        runner = ModelRunner(
            build_exact(model) if is_exact else model,
            levels,
            kv_cache,
            self.config.max_num_seqs,
            window=max_proposed + 3,
            is_exact=is_exact,
        )
        generator = torch.Generator()
        generator.seed()
        self._level_names = tuple(level.name for level in levels)
        self._hierarchy = Hierarchy(runner, lengths, generator, is_exact=is_exact)
        self._scheduler = Scheduler(
            BlockManager(num_blocks, self.config.block_size),
            self.config.max_num_seqs,
            self.config.max_prefill_tokens,
            max_proposed,
        )
        self._request_ids = itertools.count()
        self._unfinished: dict[int, Sequence] = {}
        self._streamed: set[int] = set()
        # Finished while `generate` or `stream` ran for somebody else; the next `step` returns them.
        self._undelivered: list[Completion] = []
        self.stats = Stats.of_levels(self._level_names)
        """Counts over all finished completions."""

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        adapter: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        **options: Any,
    ) -> "Engine":
        """An engine for an alias (such as `smollm2`), a hub id or a folder, with its shipped or a given adapter.

        The method is the deepest that the heads serve unless `options` say otherwise. Raises ValueError for an unknown
        name, or an adapter that does not belong to the base.
        """
        source = resolve_model(name)
        base, tokenizer = load_base(source.source, dtype=dtype, device=device, revision=source.revision)
        adapter = adapter or shipped_adapter(name)
        return cls.from_base(base, tokenizer, adapter, **options)

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: str | Path | None = None,
        **options: Any,
    ) -> "Engine":
        """An engine for a loaded base, with the heads of `adapter`, by the deepest method that they serve."""
        model = EarlyExitModel.from_configs(base, []) if adapter is None else load_adapter(adapter, base=base)
        method = ("autoregressive", "single-layer", "hispec")[min(len(model.heads), 2)]
        return cls(model, tokenizer, **({"method": method} | options))

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has any completion still to return."""
        return bool(self._unfinished or self._undelivered)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ValueError for an empty prompt or what this tokenizer cannot read."""
        if not isinstance(prompt, str) and all(isinstance(item, Integral) for item in prompt):
            token_ids = [int(item) for item in prompt]  # type: ignore[arg-type]
        elif self.tokenizer is None:
            raise ValueError("this engine has no tokenizer; give prompts as lists of token ids")
        else:
            token_ids = _tokenize(self.tokenizer, prompt)
        if not token_ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        vocab_size, max_context = self.model.backbone.vocab_size, self.model.backbone.max_context
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise ValueError(f"the prompt has a token id outside 0 to {vocab_size - 1}")
        if len(token_ids) >= max_context:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but the model's context holds {max_context}; shorten it"
            )
        return token_ids

    def encode_turn(self, text: str) -> list[int]:
        """Token ids of a user's turn, by the chat template; of the plain text where the model has none."""
        has_template = self.tokenizer is not None and self.tokenizer.chat_template is not None
        return self.encode([{"role": "user", "content": text}] if has_template and text else text)

    def check_room(self, prompt_ids: Items[int], params: SamplingParams) -> None:
        """Raise ValueError where the KV cache could never hold this request."""
        self._scheduler.check(self._max_length(prompt_ids, params))

    def _max_length(self, prompt_ids: Items[int], params: SamplingParams) -> int:
        return min(len(prompt_ids) + params.max_new_tokens, self.model.backbone.max_context)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt; returns the id that its completion will carry. ValueError if it cannot be served."""
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt)
        self.check_room(prompt_ids, params)
        self.model.follow_tensors()
        sequence = Sequence(
            request_id=next(self._request_ids),
            prompt_ids=prompt_ids,
            params=params,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids()),
            max_length=self._max_length(prompt_ids, params),
            stats=Stats.of_levels(self._level_names),
            proposed=[[] for _ in self._level_names[:-1]],
            num_computed=[0] * len(self._level_names),
            num_head_computed=[0] * (len(self._level_names) - 1),
        )
        sequence.stats.num_prompt_tokens = len(prompt_ids)
        self._scheduler.add(sequence)
        self._unfinished[sequence.request_id] = sequence
        return sequence.request_id

    def abort(self, request_id: int) -> None:
        """Drop a request that has not finished; ValueError if there is none of this id."""
        if request_id not in self._unfinished:
            raise ValueError(f"there is no unfinished request {request_id}")
        self._scheduler.finish(self._unfinished.pop(request_id))
        self._streamed.discard(request_id)

    def step(self) -> list[Completion]:
        """Read in what was admitted and run one round for the others; returns what finished."""
        self._undelivered.extend(self._advance())
        completions, self._undelivered = self._undelivered, []
        return completions

    def _advance(self) -> list[Completion]:
        prefill, decoding = self._scheduler.schedule()
        try:
            if decoding:
                self._hierarchy.round(decoding)
            if prefill:
                self._hierarchy.prefill(prefill)
        except BaseException:
            # Half of a round is no state to go on from: all is computed anew from the committed tokens.
            self._undelivered.extend(self._collect(prefill + decoding))
            self._scheduler.preempt_all()
            raise
        return self._collect(prefill + decoding)

    def _collect(self, sequences: list[Sequence]) -> list[Completion]:
        """Take out what is finished; the completions that nobody streams."""
        completions = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._scheduler.trim(sequence)
                continue
            self._scheduler.finish(sequence)
            del self._unfinished[sequence.request_id]
            completion = self._complete(sequence)
            if sequence.request_id in self._streamed:
                self._streamed.remove(sequence.request_id)
            else:
                completions.append(completion)
        return completions

    def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts; the results stand in the order of the prompts.

        `params`: one for all, or one for each. Raises ValueError for the first prompt that cannot be served, before
        any is.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a string; give a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(each)} sampling params; give one for each")
        token_ids = [self.encode(prompt) for prompt in prompts]
        for ids, p in zip(token_ids, each, strict=True):
            self.check_room(ids, p)
        request_ids = [self.add_request(ids, p) for ids, p in zip(token_ids, each, strict=True)]
        mine = dict.fromkeys(request_ids)
        num_left = len(mine)
        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:
            try:
                while num_left:
                    for completion in self._advance():
                        if completion.request_id in mine:
                            mine[completion.request_id] = completion
                            num_left -= 1
                            bar.update()
                        else:
                            self._undelivered.append(completion)
            finally:
                for request_id in mine.keys() & self._unfinished.keys():
                    self.abort(request_id)
        return [completion for completion in mine.values() if completion is not None]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt piece by piece; the deltas' texts joined are the completion's text."""
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer to stream text with")
        request_id = self.add_request(prompt, params)
        self._streamed.add(request_id)
        sequence = self._unfinished[request_id]
        detokenizer = Detokenizer(self.tokenizer)
        num_sent = 0
        try:
            # Others that run at the same time may bring this sequence forward too.
            while num_sent < len(sequence.output_ids) or sequence.finish_reason is None:
                if num_sent == len(sequence.output_ids):
                    self._undelivered.extend(self._advance())
                token_ids = sequence.output_ids[num_sent:]
                num_sent += len(token_ids)
                text = detokenizer.push(token_ids)
                if sequence.finish_reason is not None:
                    text += detokenizer.finish()
                if token_ids:
                    yield Delta(text, token_ids)
        finally:
            if request_id in self._unfinished:
                self.abort(request_id)

    def _complete(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        self.stats.add(sequence.stats)
        output_ids = sequence.output_ids
        return Completion(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.prompt_ids,
            token_ids=output_ids,
            text=None if self.tokenizer is None else decode(self.tokenizer, output_ids),
            finish_reason=sequence.finish_reason,
            stats=sequence.stats,
        )

    def _eos_ids(self) -> frozenset[int]:
        """All tokens that end a text, as the base's own `generate` takes them."""
        generation_config = self.model.base.generation_config
        eos = None if generation_config is None else generation_config.eos_token_id
        if eos is None:
            return frozenset()
        return frozenset([eos] if isinstance(eos, int) else eos)


def _tokenize(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        if not all(isinstance(item, dict) for item in prompt):
            raise ValueError(f"the prompt {prompt!r} is neither a text, nor token ids, nor a list of messages")
        if tokenizer.chat_template is None:
            raise ValueError("this model has no chat template; give the prompt as plain text")
        rendered = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None
    except TypeError:
        # What the tokenizer says of a lone surrogate, for example.
        raise ValueError("the prompt is not text that can be encoded") from None


def _should_pack(config: EngineConfig, model: EarlyExitModel) -> bool:
    if config.pack_weights is not None or model.is_packed:
        return config.pack_weights is not False
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return num_bytes <= psutil.virtual_memory().available / 2


def _levels(model: EarlyExitModel, method: str) -> tuple[Level, ...]:
    num_exits = {"autoregressive": 0, "single-layer": 1, "hispec": 2}[method]
    if len(model.heads) < num_exits:
        raise ValueError(
            f"method {method!r} needs {num_exits} exit head{'s' * (num_exits > 1)}, but the model has "
            f"{len(model.heads)}; load an adapter that has them, or choose another method"
        )
    names = (*("draft", "intermediate")[:num_exits], "target")
    stops = (*model.exit_layers[:num_exits], model.backbone.num_layers)
    starts = (0, *stops[:-1])
    heads = (*range(num_exits), None)
    return tuple(Level(*level) for level in zip(names, starts, stops, heads, strict=True))


def _default_num_blocks(config: EngineConfig, max_context: int, num_bytes_per_token: int, device: torch.device) -> int:
    full = config.max_num_seqs * -(-max_context // config.block_size)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    return max(1, min(full, int(memory * MEMORY_SHARE // (num_bytes_per_token * config.block_size))))
