"""Assistant spans are what the assistant says, whatever the template."""

import random

import pytest

from hispec.train.chat_spans import mask_spans, tokenize_chat, tokenize_spans
from hispec.train.formats import UnusableRowError

from .chat_templates import SPECIAL, TEMPLATES, chat_tokenizer

WORDS = ["tea", "Ärger", "日本", "🙂", "user", "assistant", "im", "<b>", "cA", "end\nof it", "think", "i"]
NO_SYSTEM = {"gemma"}
ONE_SEQUENCE = {"chatml", "llama3", "gemma", "phi3", "deepseek", "marked"}
"""Templates that write what was said once in the same way for ever."""


def conversation(rng, num_answers, system):
    def say():
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))

    turns = [{"role": "system", "content": say()}] if system else []
    for _ in range(num_answers):
        turns += [{"role": "user", "content": say()}, {"role": "assistant", "content": say()}]
    return turns


def asked(tokenizer, turns, place):
    """What the model reads before it makes the answer at `place`."""
    text = tokenizer.apply_chat_template(turns[:place], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def end_token(name):
    return {"gemma": "<end_of_turn>", "llama3": "<|eot|>", "mistral": "</s>", "deepseek": "</s>"}.get(
        name, "<|im_end|>"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_found_once_behind_what_inference_reads(name):
    tokenizer = chat_tokenizer(TEMPLATES[name])
    rng = random.Random(0)
    for _ in range(25):
        num_answers = rng.randint(1, 3)
        turns = conversation(rng, num_answers, system=name not in NO_SYSTEM and rng.random() < 0.5)
        sequences = tokenize_chat(tokenizer, turns)
        assert len(sequences) == (1 if name in ONE_SEQUENCE else len(sequences))
        found = [(tokens.token_ids, span) for tokens in sequences for span in tokens.spans]
        places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
        assert len(found) == len(places)
        for place, (token_ids, (start, stop)) in zip(places, found, strict=True):
            said = tokenizer.decode(token_ids[start:stop])
            assert said.endswith(end_token(name))
            body = said.removesuffix(end_token(name))
            assert not any(special in body for special in SPECIAL)
            content = turns[place]["content"]
            if name == "qwen3":
                assert body in (f"<think>\n\n</think>\n\n{content}", content)
            else:
                assert body.strip() == content
            if name == "deepseek":
                continue
            before = asked(tokenizer, turns, place)
            assert token_ids[:start] == before


def test_a_template_that_forgets_thoughts_gives_a_sequence_for_each_answer():
    tokenizer = chat_tokenizer(TEMPLATES["qwen3"])
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second"},
    ]
    first, second = tokenize_chat(tokenizer, turns)
    (start, stop), *more = first.spans
    assert tokenizer.decode(first.token_ids[start:stop]) == "<think>\nhm\n</think>\n\nfirst<|im_end|>"
    assert first.token_ids[:start] == asked(tokenizer, turns, 1)
    assert not more
    ((start, stop),) = second.spans
    assert "hm" not in tokenizer.decode(second.token_ids)
    assert second.token_ids[:start] == asked(tokenizer, turns, 3)


def test_an_answer_that_the_template_drops_or_changes_is_refused():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    for template in (
        "{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}",
    ):
        with pytest.raises(UnusableRowError, match="chat template changes"):
            tokenize_chat(chat_tokenizer(template), turns)


def test_turns_that_the_template_refuses_are_a_reason_to_drop_the_row():
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    with pytest.raises(UnusableRowError, match=r"refuses \(System role not supported\)"):
        tokenize_chat(chat_tokenizer(TEMPLATES["gemma"]), [*turns, {"role": "assistant", "content": "a"}])
    with pytest.raises(UnusableRowError, match="without an answer"):
        tokenize_chat(chat_tokenizer(TEMPLATES["chatml"]), turns)


def test_an_empty_answer_among_others_is_only_read():
    turns = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", " "), ("user", "r"))]
    tokenizer = chat_tokenizer(TEMPLATES["chatml"])
    (tokens,) = tokenize_chat(tokenizer, [*turns, {"role": "assistant", "content": "a"}])
    ((start, stop),) = tokens.spans
    assert tokenizer.decode(tokens.token_ids[start:stop]) == "a<|im_end|>"


def test_a_token_over_a_border_belongs_to_neither_side():
    tokenizer = chat_tokenizer(None)
    tokens = tokenize_spans(tokenizer, "x\nAb", [(2, 4)])
    assert tokenizer.decode(tokens.token_ids[slice(*tokens.spans[0])]) == "b"
    with pytest.raises(UnusableRowError, match="no token"):
        tokenize_spans(tokenizer, "x\nA", [(2, 3)])


class Slow:
    """A tokenizer that tells no offsets."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, text, add_special_tokens):
        return self.tokenizer(text, add_special_tokens=add_special_tokens)


def test_without_offsets_the_border_is_where_the_text_before_ends():
    tokenizer = chat_tokenizer(None)
    spans = [(2, 4), (6, 8)]
    assert tokenize_spans(Slow(tokenizer), "abcdefgh", spans) == tokenize_spans(tokenizer, "abcdefgh", spans)
    with pytest.raises(UnusableRowError, match="border"):
        tokenize_spans(Slow(tokenizer), "x\nAb", [(2, 4)])


def test_runs_of_a_mask():
    rng = random.Random(0)
    for length in [0, 1, 2, *range(3, 40)]:
        mask = [rng.random() < 0.5 for _ in range(length)]
        covered = [False] * length
        for start, stop in mask_spans(mask):
            assert start < stop
            assert start == 0 or not mask[start - 1]
            covered[start:stop] = [True] * (stop - start)
        assert covered == mask
