"""Prompts, and how the model reads them."""

from collections.abc import Sequence as Items
from numbers import Integral
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Prompt = str | Items[int] | Items[dict[str, Any]]
"""Raw text, token ids, or chat messages (`{"role", "content"}`) for the model's template."""


class PromptEncoder:
    """Turns prompts into the token ids that the model reads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ValueError for an empty prompt or what this tokenizer cannot read."""
        if not isinstance(prompt, str) and all(isinstance(item, Integral) for item in prompt):
            token_ids = [int(item) for item in prompt]  # type: ignore[arg-type]
        elif self._tokenizer is None:
            raise ValueError("this engine has no tokenizer; give prompts as lists of token ids")
        else:
            token_ids = _tokenize(self._tokenizer, prompt)
        if not token_ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        if not all(0 <= token_id < self._vocab_size for token_id in token_ids):
            raise ValueError(f"the prompt has a token id outside 0 to {self._vocab_size - 1}")
        if len(token_ids) >= self._max_context:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but the model's context holds {self._max_context}; shorten it"
            )
        return token_ids

    def encode_turn(self, text: str, system: str | None = None) -> list[int]:
        """Token ids of a user's turn, by the chat template; of the plain text where the model has none.

        `system` is a system message before it; ValueError where there is no template to put it in.
        """
        has_template = self._tokenizer is not None and self._tokenizer.chat_template is not None
        if system is not None and not has_template:
            raise ValueError("this model has no chat template, so a system message has no place; leave it out")
        turn = [{"role": "user", "content": text}]
        if system is not None:
            turn.insert(0, {"role": "system", "content": system})
        return self.encode(turn if has_template and text else text)


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
