"""The engine: prompts in, completions out."""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..checkpoints import load_adapter, load_base, shipped_adapter
from ..heads import EarlyExitModel
from ..recipes import resolve_exit_layers, resolve_model, shared_heads
from .attention import can_use_varlen
from .auto_plan import make_plan
from .block_manager import BlockManager
from .completion import Completion, build_completion
from .config import MAX_PREFILL_TOKENS, MAX_UNDISTURBED_TOKENS, EngineConfig, SamplingParams
from .exact import build_exact, try_products
from .follower import Delta, Follower, StreamerFeed
from .forms_file import use_measured_forms
from .hierarchy import Hierarchy
from .kv_cache import KVCache, bytes_per_token
from .levels import (
    METHODS,
    build_levels,
    build_policies,
    draft_lengths,
    level_names,
    max_lag,
    max_proposed,
    window_size,
)
from .logits_processor import LogitsProcessor
from .memory import default_num_blocks, should_pack
from .model_runner import ModelRunner
from .ngram_proposer import RowCost
from .planner import Plan
from .prompt import Prompt, PromptEncoder
from .proposer import build_free_drafts, build_proposer, build_tree_drafter
from .round_policy import RoundPolicy
from .scheduler import Scheduler
from .sequence import Sequence
from .sprinter import check_served
from .stats import Stats
from .stop_strings import StopStrings


class Engine:
    """Generates with `model`'s own output, sooner: the exits draft, the full depth decides.

    Options are those of `EngineConfig`. Raises ValueError where the model has too few heads for the method, or cannot
    run in exact mode here.
    """

    def __init__(self, model: EarlyExitModel, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.plan: Plan | None = None
        """What the option `plan` led to: this engine's lengths by the number of sequences that run."""
        round_policy: RoundPolicy | None = None
        row_cost: RowCost | None = None
        if options.get("plan") is not None:
            self.plan, options, round_policy, row_cost = make_plan(model, options, Engine)
        self.config = EngineConfig(**options)
        backbone = model.backbone
        levels = build_levels(model, self.config.method, self.config.exit_layers)
        if should_pack(self.config, model):
            model.pack_weights()
        use_measured_forms(model)
        lengths = draft_lengths(self.config, len(levels) - 1)
        tree_drafter = build_tree_drafter(self.config)
        max_branched = 0 if tree_drafter is None else tree_drafter.max_nodes - 1
        num_cache_layers = backbone.num_layers + len(model.heads)
        cache_shape = (num_cache_layers, backbone.num_kv_heads, backbone.head_dim)
        num_blocks = self.config.num_blocks or default_num_blocks(
            self.config, backbone.max_context, bytes_per_token(*cache_shape, backbone.dtype), backbone.device
        )
        kv_cache = KVCache(
            num_cache_layers,
            num_blocks + 1,  # one is nobody's: what fixed shapes have too many of is written there
            self.config.block_size,
            backbone.num_kv_heads,
            backbone.head_dim,
            backbone.dtype,
            backbone.device,
        )
        is_exact = self.config.exact
        by_varlen = not is_exact and can_use_varlen(kv_cache, backbone.num_heads)
        if self.config.cuda_graphs and not by_varlen:
            raise ValueError(
                "cuda_graphs needs torch's paged attention kernel: an NVIDIA GPU, a 16-bit model, often block_size=256 "
                "too, and no exact mode; change that or leave out cuda_graphs"
            )
        self._exact = build_exact(model) if is_exact else None
        self._runner = ModelRunner(
            self._exact or model,
            levels,
            kv_cache,
            self.config.max_num_seqs,
            window=window_size(self.config, len(levels) - 1) + max_branched,
            max_lag=max_lag(self.config),
            is_exact=is_exact,
            by_varlen=by_varlen,
            uses_graphs=by_varlen and self.config.cuda_graphs is not False and tree_drafter is None,
        )
        generator = torch.Generator()
        generator.seed()
        self._encoder = PromptEncoder(tokenizer, backbone.vocab_size, backbone.max_context)
        self._level_names = level_names(self.config, levels)
        self._num_proposing = len(lengths)
        policies = build_policies(self.config, lengths)
        proposer = build_proposer(self.config, self._runner, policies, generator, row_cost)
        free_drafts = build_free_drafts(self.config, self._runner, policies, row_cost)
        self._hierarchy = Hierarchy(
            self._runner,
            policies,
            generator,
            proposer,
            tree_drafter,
            round_policy=round_policy,
            free_drafts=free_drafts,
            is_exact=is_exact,
        )
        self._scheduler = Scheduler(
            BlockManager(num_blocks, self.config.block_size),
            self.config.max_num_seqs,
            self.config.max_prefill_tokens or MAX_PREFILL_TOKENS,
            max_proposed(self.config, len(levels) - 1),
            max_branched,
            max_undisturbed=self.config.max_prefill_tokens or MAX_UNDISTURBED_TOKENS,
        )
        self._num_changes = model.num_changes
        self._request_ids = itertools.count()
        self._unfinished: dict[int, list[Sequence]] = {}
        self._followers: dict[int, Follower] = {}
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

        An alias whose recipe has shared heads alone needs none. The method is the deepest that the heads serve unless
        `options` say otherwise. Raises ValueError for an unknown name, or an adapter that does not belong to the base.
        """
        source = resolve_model(name)
        base, tokenizer = load_base(source.source, dtype=dtype, device=device, revision=source.revision)
        adapter = adapter or shipped_adapter(name)
        if adapter is None and (heads := shared_heads(name)) is not None:
            num_layers = EarlyExitModel.from_configs(base, []).backbone.num_layers
            configs = heads.configs(resolve_exit_layers(heads.exit_layers, num_layers))
            return cls._by_deepest_method(EarlyExitModel.from_configs(base, configs), tokenizer, options)
        return cls.from_base(base, tokenizer, adapter, **options)

    @classmethod
    def from_base(
        cls,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: str | Path | None = None,
        **options: Any,
    ) -> "Engine":
        """An engine for a loaded base, with the heads of `adapter`, by the deepest method that they, or those of the
        option `exit_layers`, serve."""
        model = EarlyExitModel.from_configs(base, []) if adapter is None else load_adapter(adapter, base=base)
        return cls._by_deepest_method(model, tokenizer, options)

    @classmethod
    def _by_deepest_method(
        cls, model: EarlyExitModel, tokenizer: PreTrainedTokenizerBase | None, options: dict[str, Any]
    ) -> "Engine":
        num_exits = len(model.heads if options.get("exit_layers") is None else options["exit_layers"])
        method = METHODS[min(num_exits, 2)]
        default = {"method": method} if options.get("plan") is None else {}
        return cls(model, tokenizer, **(default | options))

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has any completion still to return."""
        return bool(self._unfinished or self._undelivered)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ValueError for an empty prompt or what this tokenizer cannot read."""
        return self._encoder.encode(prompt)

    def encode_turn(self, text: str, system: str | None = None) -> list[int]:
        """Token ids of a user's turn, as `PromptEncoder.encode_turn`."""
        return self._encoder.encode_turn(text, system)

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for what this model or its tokenizer cannot serve."""
        vocab_size = self.model.backbone.vocab_size
        for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= vocab_size:
                    raise ValueError(f"{name} holds {token_id}, but the model's token ids end at {vocab_size - 1}")
        if len(set(params.banned_token_ids)) == vocab_size:
            raise ValueError("banned_token_ids ban every token of the model; leave at least one")
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise ValueError(f"logprobs is {params.logprobs}, but the model has only {vocab_size} tokens")
        if params.stop and self.tokenizer is None:
            raise ValueError("this engine has no tokenizer to find stop strings with; use stop_token_ids")
        if self.config.method == "sprinter":
            check_served(params)

    def check_room(self, prompt_ids: Items[int], params: SamplingParams) -> None:
        """Raise ValueError where the KV cache could never hold this request."""
        self._scheduler.check(self._max_length(prompt_ids, params))

    def _max_length(self, prompt_ids: Items[int], params: SamplingParams) -> int:
        return min(len(prompt_ids) + params.max_new_tokens, self.model.backbone.max_context)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt; returns the id that its completions, `n` of them, will carry.

        Raises ValueError if it cannot be served.
        """
        params = params or SamplingParams()
        prompt_ids = self.encode(prompt)
        self.check_params(params)
        self.check_room(prompt_ids, params)
        self.model.follow_tensors()
        self._runner.forget_chains()
        if self._num_changes != self.model.num_changes:
            if self._exact is not None:
                try_products(self._exact)
            self._num_changes = self.model.num_changes
            self._runner.forget_graphs()
        request_id = next(self._request_ids)
        self._unfinished[request_id] = [
            self._new_sequence(request_id, index, prompt_ids, params) for index in range(params.n)
        ]
        for sequence in self._unfinished[request_id]:
            self._scheduler.add(sequence)
        return request_id

    def _new_sequence(self, request_id: int, index: int, prompt_ids: list[int], params: SamplingParams) -> Sequence:
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        sequence = Sequence(
            request_id=request_id,
            index=index,
            prompt_ids=prompt_ids,
            params=params,
            stop_ids=stop_ids,
            max_length=self._max_length(prompt_ids, params),
            stats=Stats.of_levels(self._level_names),
            proposed=[[] for _ in range(self._num_proposing)],
            num_computed=[0] * len(self._runner.levels),
            num_head_computed=[0] * (len(self._runner.levels) - 1),
        )
        sequence.stats.num_prompt_tokens = len(prompt_ids)
        if params.changes_logits:
            backbone = self.model.backbone
            sequence.logits_processor = LogitsProcessor(
                params, prompt_ids, stop_ids, backbone.vocab_size, backbone.device
            )
        if params.stop:
            assert self.tokenizer is not None
            sequence.stop_strings = StopStrings(
                self.tokenizer,
                params.stop,
                include_stop=params.include_stop,
                min_new_tokens=params.min_new_tokens,
            )
        return sequence

    def abort(self, request_id: int) -> None:
        """Drop a request that has not finished; ValueError if there is none of this id."""
        if request_id not in self._unfinished:
            raise ValueError(f"there is no unfinished request {request_id}")
        for sequence in self._unfinished.pop(request_id):
            self._scheduler.finish(sequence)
        self._followers.pop(request_id, None)

    def step(self) -> list[Completion]:
        """Run one round for those that are read in, and read on for the others; returns what finished."""
        self.advance()
        completions, self._undelivered = self._undelivered, []
        return completions

    def follow(self, request_id: int) -> Follower:
        """Watch an unfinished request grow; its completion then goes to the follower, and `step` does not return it.

        ValueError if there is no unfinished request of this id.
        """
        if request_id not in self._unfinished:
            raise ValueError(f"there is no unfinished request {request_id}")
        texts = self._unfinished[request_id]
        if texts[0].params.n > 1:
            raise ValueError(f"request {request_id} is for {texts[0].params.n} texts, and only one can be followed")
        follower = Follower(texts[0], self._level_names, self.tokenizer)
        self._followers[request_id] = follower
        return follower

    def advance(self) -> None:
        """Do the work of `step`; what finished and nobody follows waits for the next `step`."""
        self._undelivered.extend(self._advance())

    def _advance(self) -> list[Completion]:
        chunks, decoding = self._scheduler.schedule()
        sequences = [chunk.sequence for chunk in chunks] + decoding
        try:
            if decoding:
                self._hierarchy.round(decoding)
            if chunks:
                self._hierarchy.prefill(chunks)
        except BaseException:
            # Half of a round is no state to go on from: all is computed anew from the committed tokens.
            self._undelivered.extend(self._collect(sequences))
            self._scheduler.preempt_all()
            raise
        return self._collect(sequences)

    def _collect(self, sequences: list[Sequence]) -> list[Completion]:
        """Take out what is finished; the completions that nobody follows."""
        completions = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._scheduler.trim(sequence)
                continue
            self._scheduler.finish(sequence)
            unfinished = self._unfinished[sequence.request_id]
            unfinished.remove(sequence)
            if not unfinished:
                del self._unfinished[sequence.request_id]
            self.stats.add(sequence.stats)
            completion = build_completion(sequence, self._level_names, self.tokenizer)
            follower = self._followers.pop(sequence.request_id, None)
            if follower is None:
                completions.append(completion)
            else:
                follower.completion = completion
        return completions

    def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        progress: bool = False,
        streamer: BaseStreamer | None = None,
    ) -> list[Completion]:
        """Complete all prompts; the results stand in the order of the prompts, the `n` texts of each side by side.

        `params`: one for all, or one for each. `streamer`: one of transformers', for a single prompt; it is given the
        prompt's tokens `[1, N]`, then the new tokens `[K]` of each round, then its end. Raises ValueError for the
        first prompt that cannot be served, before any is; what `add_request` queued is not touched by that and runs
        on in the next steps.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a string; give a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts but {len(each)} sampling params; give one for each")
        if streamer is not None and (len(prompts) != 1 or each[0].n > 1):
            raise ValueError(
                f"a streamer takes one prompt and one text at a time, and there are {len(prompts)} prompts; give one, "
                "or `stream` each"
            )
        token_ids = []
        for place, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            try:
                token_ids.append(self.encode(prompt))
                self.check_params(p)
                self.check_room(token_ids[-1], p)
            except ValueError as error:
                raise ValueError(f"prompt {place} of {len(prompts)} (counted from 0): {error}") from None
        request_ids = [self.add_request(ids, p) for ids, p in zip(token_ids, each, strict=True)]
        mine: dict[int, list[Completion]] = {request_id: [] for request_id in request_ids}
        num_left = sum(p.n for p in each)
        feed = None
        with tqdm(total=num_left, unit="text", disable=not progress) as bar:
            try:
                if streamer is not None:
                    feed = StreamerFeed(streamer, self._unfinished[request_ids[0]][0], self._level_names)
                while num_left:
                    for completion in self._advance():
                        if completion.request_id in mine:
                            mine[completion.request_id].append(completion)
                            num_left -= 1
                            bar.update()
                        else:
                            self._undelivered.append(completion)
                    if feed is not None:
                        feed.update()
            finally:
                for request_id in mine.keys() & self._unfinished.keys():
                    self.abort(request_id)
        return [
            completion
            for texts in mine.values()
            for completion in sorted(texts, key=lambda completion: completion.index)
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt piece by piece; the deltas' texts joined are the completion's text.

        Raises FloatingPointError behind the last piece where the completion's `error` would stand.
        """
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer to stream text with")
        if params is not None and params.n > 1:
            raise ValueError(f"n is {params.n}, but a stream is one text; stream each of them, or use generate")
        request_id = self.add_request(prompt, params)
        follower = self.follow(request_id)
        try:
            while True:
                # Others that run at the same time may bring this sequence forward too.
                while (delta := follower.read()) is None:
                    self.advance()
                yield delta
                if delta.finish_reason == "error":
                    raise FloatingPointError(follower.error)
                if delta.finish_reason is not None:
                    return
        finally:
            if request_id in self._unfinished:
                self.abort(request_id)

    @property
    def eos_ids(self) -> frozenset[int]:
        """All tokens that end a text, as the base's own `generate` takes them."""
        generation_config = self.model.base.generation_config
        eos = None if generation_config is None else generation_config.eos_token_id
        if eos is None:
            return frozenset()
        return frozenset([eos] if isinstance(eos, int) else eos)
