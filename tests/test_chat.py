"""A conversation, with fed questions and signals."""

import io
import re
import signal

import pytest

from hispec.infer import Engine, SamplingParams
from hispec.infer.chat import Chat, ask_in_terminal

from .models import build_heads, reference, shallow
from .train_support import build_tokenizer

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ message['content'] }} {% endfor %}"
)


def chat_tokenizer(template=PLAIN_TEMPLATE):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def engine(base):
    """Reads a conversation as its words one after the other."""
    return Engine(build_heads(shallow(base, 3), "good"), chat_tokenizer(), num_blocks=40)


class Terminal:
    """Feeds lines, each a text or an exception, and keeps what is printed."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.output, self.notes = io.StringIO(), io.StringIO()

    def ask(self, prompt):
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    def talk(self, engine, max_new_tokens=6, **options):
        params = SamplingParams(max_new_tokens=max_new_tokens)
        chat = Chat(engine, params, ask=self.ask, output=self.output, notes=self.notes, **options)
        chat.run()
        assert not self.lines
        assert not engine.has_unfinished
        return chat


def answer(engine, words, number=6):
    ids = reference(engine.model.base, [int(word[1:]) for word in words.split()], number, eos_token_id=2)
    return " ".join(f"w{token_id}" for token_id in ids if token_id > 2)


def test_the_history_goes_along(engine):
    terminal = Terminal("w3 w4", "", "w5")
    chat = terminal.talk(engine)
    first = answer(engine, "w3 w4")
    second = answer(engine, f"w3 w4 {first} w5")
    assert terminal.output.getvalue() == f"{first}\n{second}\n"
    assert [message["content"] for message in chat.messages] == ["w3 w4", first, "w5", second]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    notes = terminal.notes.getvalue()
    assert notes.count("cut off after 6 tokens; --max-new-tokens allows more") == 2
    stats = r"\(6 tokens in .* s, .* tokens/s \| draft \d+%, intermediate \d+%, target \d+% \| .* computed per token\)"
    assert len(re.findall(stats, notes)) == 2


def test_a_system_message_stays(engine):
    terminal = Terminal("w3", "/reset", "w4")
    chat = terminal.talk(engine, system="w9 w8")
    assert terminal.output.getvalue() == f"{answer(engine, 'w9 w8 w3')}\n{answer(engine, 'w9 w8 w4')}\n"
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_undo_takes_back_one_turn(engine):
    terminal = Terminal("w3", "w4", "/undo", "w5", "/undo", "/undo", "/undo")
    chat = terminal.talk(engine, system="w9")
    first = answer(engine, "w9 w3")
    assert terminal.output.getvalue().splitlines()[2] == answer(engine, f"w9 w3 {first} w5")
    assert chat.messages == [{"role": "system", "content": "w9"}]
    notes = terminal.notes.getvalue()
    assert [notes.count(f"took back: {word}\n") for word in ("w3", "w4", "w5")] == [1, 1, 1]
    assert notes.count("there is nothing to take back") == 1


def test_commands(engine):
    terminal = Terminal("/help", "/nonsense", KeyboardInterrupt(), "/exit")
    terminal.talk(engine)
    notes = terminal.notes.getvalue()
    for command in ("/reset", "/undo", "/help", "/exit", "Ctrl-C"):
        assert command in notes
    assert "there is no command /nonsense; /help lists them" in notes
    assert "/exit or Ctrl-D leaves" in notes
    assert terminal.output.getvalue() == ""


class InterruptedAt(io.StringIO):
    """Sends Ctrl-C so many times when so much has been written."""

    def __init__(self, num_writes, num_signals):
        super().__init__()
        self.num_writes, self.num_signals = num_writes, num_signals

    def write(self, text):
        written = super().write(text)
        self.num_writes -= bool(text)
        if self.num_writes == 0 and text:
            for _ in range(self.num_signals):
                signal.raise_signal(signal.SIGINT)
        return written


@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(engine, num_signals):
    handler = signal.getsignal(signal.SIGINT)
    terminal = Terminal("w3 w4", "w5")
    terminal.output = InterruptedAt(2, num_signals)
    chat = terminal.talk(engine, max_new_tokens=60)
    said = chat.messages[1]["content"]
    assert answer(engine, "w3 w4", 60).startswith(said)
    assert 0 < len(said.split()) < 60
    assert "stopped" in terminal.notes.getvalue()
    assert terminal.output.getvalue().startswith(f"{said}\n")
    # The talk goes on from what was said.
    assert chat.messages[3]["content"] == answer(engine, f"w3 w4 {said} w5", 60)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_question_without_an_answer_is_forgotten(engine, monkeypatch):
    advance = engine.advance

    def interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine, "advance", interrupt)
    terminal = Terminal("w3")
    assert terminal.talk(engine).messages == []
    assert "nothing was said, so the question is forgotten" in terminal.notes.getvalue()
    monkeypatch.setattr(engine, "advance", advance)


def test_a_full_context_is_told_and_the_session_goes_on(base):
    base = shallow(base, 3)
    model = build_heads(base, "good")
    model.backbone.max_context = 16
    engine = Engine(model, chat_tokenizer(), num_blocks=40)
    terminal = Terminal("w3 " * 13, "w4", "/undo", "w5")
    chat = terminal.talk(engine, max_new_tokens=5)
    notes = terminal.notes.getvalue()
    assert "cut off: the model's context of 16 tokens is full; /undo and /reset make room" in notes
    assert "not asked: the prompt has 17 tokens, but the model's context holds 16" in notes
    assert len(chat.messages) == 2
    assert chat.messages[0]["content"] == "w5"


def test_colours_and_their_legend(engine):
    terminal = Terminal("w3 w4", "w5")
    terminal.talk(engine, use_colour=True)
    plain = Terminal("w3 w4", "w5")
    plain.talk(engine)
    coloured = terminal.output.getvalue()
    assert "\033[32m" in coloured
    assert "\033[" not in plain.output.getvalue() + plain.notes.getvalue()
    assert re.sub("\033\\[\\d+m", "", coloured) == plain.output.getvalue()
    assert terminal.notes.getvalue().count("colour of the level") == 1


def test_one_level_needs_no_colours(base):
    engine = Engine(build_heads(base, "good"), chat_tokenizer(), method="autoregressive", num_blocks=40)
    terminal = Terminal("w3")
    terminal.talk(engine, use_colour=True)
    assert "\033[" not in terminal.output.getvalue() + terminal.notes.getvalue()


def test_models_that_cannot_chat_are_refused(base):
    model = build_heads(base, "good")
    with pytest.raises(ValueError, match="no chat template, so it cannot chat; give it --prompt TEXT instead"):
        Chat(Engine(model, build_tokenizer(), num_blocks=40), SamplingParams())
    strict = Engine(model, chat_tokenizer(STRICT_TEMPLATE), num_blocks=40)
    Chat(strict, SamplingParams())
    with pytest.raises(ValueError, match="the chat template refuses these messages: no system message"):
        Chat(strict, SamplingParams(), system="w3")


def test_piped_lines_are_read_without_a_prompt(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("w3\n"))
    assert ask_in_terminal("> ") == "w3"
    with pytest.raises(EOFError):
        ask_in_terminal("> ")
    assert capsys.readouterr().out == ""
