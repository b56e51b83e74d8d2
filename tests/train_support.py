"""A tiny tokenizer, tiny prompts, random responses and a full disk for the tests of training and saving."""

import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hispec.train import Response


def build_tokenizer(vocab_size: int = 64, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """One word a token: `w3` is token 3; the first three are special, and `extra` words come behind."""
    words = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(3, vocab_size)), *extra]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def write_prompts(path: Path, num_prompts: int = 12) -> Path:
    """A prompts file of two kinds."""
    rng = random.Random(0)
    lines = []
    for number in range(num_prompts):
        words = [f"w{rng.randrange(3, 64)}" for _ in range(rng.randint(1, 6))]
        record = {"id": f"p{number}", "kind": "odd" if number % 2 else "even", "prompt": " ".join(words)}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    return path


def random_responses(num_responses: int = 20, vocab_size: int = 64, seed: int = 0) -> list[Response]:
    """Responses of 1 to 24 tokens to prompts of 1 to 6."""
    rng = random.Random(seed)

    def tokens(longest: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest))]

    return [
        Response(
            prompt_id=f"p{number // 2}",
            kind="odd" if number // 2 % 2 else "even",
            sample=number % 2,
            prompt_token_ids=tokens(6),
            token_ids=tokens(24),
        )
        for number in range(num_responses)
    ]


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond `num_bytes`: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
