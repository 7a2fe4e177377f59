"""Target in its own process: a crash or an endless call ends that process, not the run."""

import multiprocessing
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

from kvloom.conform.describe import Call, Operator, Results, Vector
from kvloom.conform.operators import OPERATORS
from kvloom.conform.outcomes import CallRefused, NoAnswer, Target, Unsupported
from kvloom.conform.targets import TIMEOUT, at, ended, open_target
from kvloom.errors import ArgumentError

_START: Final = 120.0
"""Additional seconds for a process to import torch and open its target."""
_SAID: Final = {kind.__name__: kind for kind in (ArgumentError, NoAnswer, CallRefused, Unsupported)}
"""Exceptions of a target, by name."""


@contextmanager
def isolated(text: str, timeout: float = TIMEOUT) -> Iterator[Target]:
    """Context with a target in its own process, which is started again if it ends.

    Args:
        text: Name of the target, as for ``open_target``. A Python callable is imported by the process.
        timeout: Maximum seconds for one vector.

    Raises:
        ArgumentError: it cannot be opened there, or ``timeout`` is not positive.
    """
    if not timeout > 0:
        raise ArgumentError(f"--timeout must be more than 0 seconds, got {timeout:g}")
    if text.startswith("command:"):  # its calls are processes already
        yield open_target(text, timeout)
        return
    worker = _Worker(text, timeout)
    try:
        worker.start()
        yield worker
    finally:
        worker.stop()


class _Worker:
    """Sends calls to the process and receives answers."""

    def __init__(self, text: str, timeout: float) -> None:
        self._text, self._timeout = text, timeout
        self._process: Any = None
        self._pipe: Any = None

    def start(self) -> None:
        """Start the process and wait until it has opened the target."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._text))
        self._process.start()
        theirs.close()
        try:
            problem = self._answer(_START + self._timeout, " while it was opened")
        except NoAnswer as error:
            raise ArgumentError(f"TARGET must be one that can be opened: {error}") from error
        if problem:
            self.stop()
            raise ArgumentError(problem)

    def stop(self) -> None:
        """End the process, even in a call."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def __call__(self, operator: Operator, vector: Vector, call: Call) -> Results:
        """Make one call in the process; ``call`` gets the arguments after it."""
        if self._process is None:
            try:
                self.start()
            except ArgumentError as error:
                raise NoAnswer(f"the process could not be started again{at(vector)}: {error}") from error
        question = pickle.dumps((operator.name, vector, call))
        kind, said, after = self._answer(self._timeout, at(vector), question)
        call.update(after)
        if kind:
            raise _SAID[kind](said)
        results: Results = said
        return results

    def _answer(self, seconds: float, when: str, question: bytes | None = None) -> Any:
        try:
            if question is not None:
                self._pipe.send_bytes(question)
            if self._pipe.poll(seconds):
                return pickle.loads(self._pipe.recv_bytes())  # noqa: S301 (our own process wrote it)
        except (EOFError, ConnectionError) as error:
            self._process.join(_START)
            status = self._process.exitcode
            self.stop()
            raise NoAnswer(ended(status, when)) from error
        self.stop()
        raise NoAnswer(f"no answer within {seconds:g} s{when}")


def _serve(pipe: Connection, text: str) -> None:
    """Main function of the process: open the target, then answer calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends it
    try:
        target = open_target(text)
    except ArgumentError as error:
        pipe.send_bytes(pickle.dumps(str(error)))
        return
    pipe.send_bytes(pickle.dumps(""))
    while True:
        try:
            name, vector, call = pickle.loads(pipe.recv_bytes())  # noqa: S301 (the run wrote it)
        except EOFError:
            return
        kind, said = _answer_to(target, OPERATORS[name], vector, call)
        pipe.send_bytes(pickle.dumps((kind, said, call)))


def _answer_to(target: Target, operator: Operator, vector: Vector, call: Call) -> tuple[str, Any]:
    try:
        return "", target(operator, vector, call)
    except tuple(_SAID.values()) as error:
        return type(error).__name__, str(error)
