"""The engine for asyncio: many consumers, one worker thread."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import TracebackType

from .completion import Completion
from .config import SamplingParams
from .engine import Engine
from .follower import Delta, Follower
from .prompt import Prompt


@dataclass(eq=False, kw_only=True)
class _Request:
    """One consumer's request; `inbox` and `loop` are the consumer's, `follower` is the worker's."""

    prompt: Prompt
    params: SamplingParams | None
    wants_deltas: bool
    loop: asyncio.AbstractEventLoop
    inbox: "asyncio.Queue[Delta | Completion | BaseException]" = field(default_factory=asyncio.Queue)
    follower: Follower | None = None
    is_cancelled: bool = False

    def send(self, item: Delta | Completion | BaseException) -> None:
        """Called by the worker; never waits, however slow the consumer is."""
        try:
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)
        except RuntimeError:
            # The consumer's event loop is gone, and the consumer with it.
            self.is_cancelled = True


class AsyncEngine:
    """Serves an engine to any number of tasks at once; requests that run at the same time share their rounds.

    The engine works in one thread of its own, so neither a slow consumer nor a busy event loop holds up the others;
    what a consumer has not fetched yet waits for it. Until `close` the engine must not be used otherwise. A consumer
    that is cancelled, or leaves its stream, gives its request up. An error of the engine reaches every consumer that
    waits; requests that come later are served again.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.has_unfinished:
            raise ValueError("this engine has unfinished requests; finish or abort them first")
        self.engine = engine
        """The engine served; its `stats` may be read at any time."""
        self._submitted: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Delta, None]:
        """Complete one prompt piece by piece, as `Engine.stream` does; ValueError if it cannot be served."""
        if self.engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer to stream text with")
        request = self._submit(prompt, params, wants_deltas=True)
        try:
            while True:
                item = await request.inbox.get()
                if isinstance(item, BaseException):
                    raise item
                assert isinstance(item, Delta)
                yield item
                # Behind the last piece of a generation that failed comes its error.
                if item.finish_reason not in (None, "error"):
                    return
        finally:
            request.is_cancelled = True

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Complete one prompt; ValueError if it cannot be served."""
        request = self._submit(prompt, params, wants_deltas=False)
        try:
            item = await request.inbox.get()
        finally:
            request.is_cancelled = True
        if isinstance(item, BaseException):
            raise item
        assert isinstance(item, Completion)
        return item

    async def close(self) -> None:
        """Give up what still runs, whose consumers get a RuntimeError, and end the thread; may be called again."""
        with self._lock:
            thread = self._thread
            if thread is not None and not self._is_closed:
                self._submitted.put(None)
            self._is_closed = True
        if thread is not None:
            await asyncio.to_thread(thread.join)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _submit(self, prompt: Prompt, params: SamplingParams | None, *, wants_deltas: bool) -> _Request:
        request = _Request(prompt=prompt, params=params, wants_deltas=wants_deltas, loop=asyncio.get_running_loop())
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this AsyncEngine is closed; make a new one")
            if self._thread is None:
                # A daemon: who forgets `close` still gets out of the program.
                self._thread = threading.Thread(target=self._work, name="hispec-engine", daemon=True)
                self._thread.start()
            self._submitted.put(request)
        return request

    def _work(self) -> None:
        """The worker thread: admit, run a round, hand out, until closed."""
        running: list[_Request] = []
        while self._admit_submitted(running):
            for request in running:
                if request.is_cancelled:
                    self._abort(request)
            running = [request for request in running if not request.is_cancelled]
            if not running:
                continue
            error: BaseException | None = None
            try:
                self.engine.advance()
            except BaseException as caught:  # whatever it is, nobody may wait for ever
                error = caught
            running = [request for request in running if not self._hand_out(request, error)]
        for request in running:
            self._abort(request)
            request.send(RuntimeError("the AsyncEngine was closed before this request had finished"))

    def _admit_submitted(self, running: list[_Request]) -> bool:
        """Take what was submitted, waiting for it where nothing runs; False when closed."""
        while True:
            try:
                request = self._submitted.get(block=not running)
            except queue.Empty:
                return True
            if request is None:
                return False
            if request.is_cancelled:
                continue
            try:
                request.follower = self.engine.follow(self.engine.add_request(request.prompt, request.params))
            except BaseException as error:
                request.send(error)
            else:
                running.append(request)

    def _hand_out(self, request: _Request, error: BaseException | None) -> bool:
        """Send what is new; whether the request is over."""
        follower = request.follower
        assert follower is not None
        try:
            delta = follower.read() if request.wants_deltas else None
        except BaseException as caught:
            error = error or caught
        else:
            if delta is not None:
                request.send(delta)
            if follower.completion is not None:
                if not request.wants_deltas:
                    request.send(follower.completion)
                elif follower.error is not None:
                    request.send(FloatingPointError(follower.error))
                return True
        if error is None:
            return False
        self._abort(request)
        request.send(error)
        return True

    def _abort(self, request: _Request) -> None:
        assert request.follower is not None
        if request.follower.completion is None:
            self.engine.abort(request.follower.request_id)
