"""A conversation in the terminal."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from typing import TextIO

from .config import SamplingParams
from .engine import Engine
from .follower import Delta, Follower
from .palette import Painter, legend
from .stats import Stats

HELP = """\
/reset  forget the conversation, but not the system message
/undo   take back the last question and its answer
/help   this list
/exit   leave, as Ctrl-D does
Ctrl-C  stop an answer; what was said stays"""


class Chat:
    """Questions from `ask`, answers to `output` as they grow, all else to `notes`.

    `ask` takes the text before the cursor, returns a line, and raises EOFError at the end. Raises ValueError where the
    model has no chat template, or one that refuses the system message.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        system: str | None = None,
        use_colour: bool = False,
        ask: Callable[[str], str] | None = None,
        output: TextIO | None = None,
        notes: TextIO | None = None,
    ) -> None:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise ValueError("this model has no chat template, so it cannot chat; give it --prompt TEXT instead")
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._params = params
        self._level_names = tuple(engine.stats.levels)
        self._use_colour = use_colour and len(self._level_names) > 1
        self._ask = ask or ask_in_terminal
        self._output = output or sys.stdout
        self._notes = notes or sys.stderr
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._start)
        """The conversation so far, in the order in which the model reads it."""
        engine.encode([*self.messages, {"role": "user", "content": "?"}])

    def run(self) -> None:
        """Talk until /exit or the end of the input."""
        self._note("/help lists the commands; Ctrl-D leaves")
        if self._use_colour:
            self._note(legend(self._level_names))
        while True:
            try:
                line = self._ask("> ").strip()
            except EOFError:
                self._note("")
                return
            except KeyboardInterrupt:
                self._note("\n/exit or Ctrl-D leaves")
                continue
            if line in ("/exit", "/quit"):
                return
            self._handle(line)

    def _handle(self, line: str) -> None:
        if line == "/help":
            self._note(HELP)
        elif line == "/reset":
            self.messages = list(self._start)
            self._note("the conversation starts anew")
        elif line == "/undo":
            self._undo()
        elif line.startswith("/") and len(line.split()) == 1:
            self._note(f"there is no command {line}; /help lists them")
        elif line:
            self._answer(line)

    def _undo(self) -> None:
        if len(self.messages) == len(self._start):
            self._note("there is nothing to take back")
            return
        question, _ = self.messages[-2:]
        del self.messages[-2:]
        self._note(f"took back: {question['content']}")

    def _answer(self, question: str) -> None:
        turn = [*self.messages, {"role": "user", "content": question}]
        try:
            request_id = self._engine.add_request(turn, self._params)
        except ValueError as error:
            self._note(f"not asked: {error}; /undo and /reset make room")
            return
        follower, start = self._engine.follow(request_id), time.perf_counter()
        deltas = self._print_answer(follower)
        seconds = time.perf_counter() - start
        print(file=self._output, flush=True)
        if text := "".join(delta.text for delta in deltas):
            self.messages = [*turn, {"role": "assistant", "content": text}]
        else:
            self._note("nothing was said, so the question is forgotten")
        if not deltas:
            return
        if deltas[-1].finish_reason is None:
            self._note("stopped")
        elif deltas[-1].finish_reason == "length":
            self._note(self._explain_length(follower))
        self._note(describe_answer(deltas, follower.stats, seconds))

    def _print_answer(self, follower: Follower) -> list[Delta]:
        painter = Painter(self._tokenizer) if self._use_colour else None
        deltas: list[Delta] = []
        with waiting_interrupt() as interrupt, suppress(KeyboardInterrupt):
            try:
                while not deltas or deltas[-1].finish_reason is None:
                    if (delta := follower.read()) is None:
                        if interrupt.is_set():
                            break
                        self._engine.advance()
                        continue
                    deltas.append(delta)
                    print(painter.paint(delta) if painter else delta.text, end="", file=self._output, flush=True)
            finally:
                if follower.completion is None:
                    self._engine.abort(follower.request_id)
        return deltas

    def _explain_length(self, follower: Follower) -> str:
        assert follower.completion is not None
        num_tokens, max_context = len(follower.completion.token_ids), self._engine.model.backbone.max_context
        if len(follower.completion.prompt_token_ids) + num_tokens >= max_context:
            return f"cut off: the model's context of {max_context} tokens is full; /undo and /reset make room"
        return f"cut off after {num_tokens} tokens; --max-new-tokens allows more"

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


def describe_answer(deltas: Items[Delta], stats: Stats, seconds: float) -> str:
    """One line: speed, whose choice the tokens were, and layers run per token."""
    origins = [origin for delta in deltas for origin in delta.origins]
    parts = [f"{len(origins)} tokens in {seconds:.1f} s, {len(origins) / seconds:.1f} tokens/s"]
    if len(stats.levels) > 1:
        parts.append(", ".join(f"{name} {origins.count(name) / len(origins):.0%}" for name in stats.levels))
    if stats.layers_per_token:
        parts.append(f"{stats.layers_per_token:.1f} layers computed per token")
    return f"({' | '.join(parts)})"


@contextmanager
def waiting_interrupt() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C only sets the event, so that no round is torn; the second raises KeyboardInterrupt."""
    interrupt = threading.Event()

    def handle(*_: object) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def ask_in_terminal(prompt: str) -> str:
    """A line from standard input, with the prompt where somebody sits before it; EOFError at its end."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its editing keys)
    return input(prompt if sys.stdin.isatty() else "")
