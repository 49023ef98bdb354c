"""Checks grammars in a process of its own, which can be ended.

llguidance bounds what most grammars cost, but not all: some intersections of regular expressions take for ever to
compile, and what compiles in a thread can't be stopped. So every new grammar is compiled here first, and a text is
written by it. The process has a bound on its memory, and is ended when a grammar takes too long.

This file is also the program of that process: it imports nothing of this project.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_PATIENCE_S = 5.0
_MEMORY_BYTES = 2 << 30
_NUM_STEPS = 64
_SLOW_S = 0.1
"""No grammar that can be used takes so long over a token."""


def limits() -> LLParserLimits:
    """llguidance's own: of the work of compiling, and of one mask, which takes some 20 ms at the most."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False)


class GrammarCheck:
    """The process. It is started with the first grammar and ends with this one; several threads may ask it."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object]
        self._lock = threading.Lock()

    def refusal(self, source: str) -> str:
        """Why a grammar, as llguidance reads it, can't be used; empty if it can."""
        with self._lock:
            if self._process is None:
                self._process = _start()
                self._end = weakref.finalize(self, _kill, self._process)
            answer = _ask(self._process, source, self._patience_s)
            if answer is None:
                self._end()
                self._process = None
                return "it is too complex"
            return answer


def _start() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what the terminal sends to the server is not for it
    )
    if _answer(process, 10 * _PATIENCE_S) is None:
        _kill(process)
        raise RuntimeError("the process that checks grammars did not start")
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[bytes], source: str, patience_s: float) -> str | None:
    """What the process says of a grammar; None if it says nothing in time, or has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(source).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _answer(process, patience_s)


def _answer(process: subprocess.Popen[bytes], patience_s: float) -> str | None:
    assert process.stdout is not None
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        line = process.stdout.readline() if selector.select(patience_s) else b""
    return str(json.loads(line)) if line else None


# The process


def _check(source: str) -> str:
    """Compiles a grammar over the alphabet of bytes and follows it for a while, one byte after another."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=limits())
    pace, slowest = random.Random(0), 0.0
    for _ in range(_NUM_STEPS):
        if matcher.is_stopped():
            break
        started = time.perf_counter()
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        if allowed:
            matcher.consume_token(pace.choice(allowed))
        slowest = max(slowest, time.perf_counter() - started)
    if matcher.is_error():
        return matcher.get_error() or "it can't be followed"
    return "it is too complex" if slowest > _SLOW_S else ""


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    _say(_check('start: "a"'))
    for line in sys.stdin:
        _say(_check(json.loads(line)))


def _say(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    _serve()
