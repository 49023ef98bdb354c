"""Checks grammars in processes of their own, which can be ended.

llguidance bounds what most grammars cost, but not all: some intersections of regular expressions take for ever to
compile, and what compiles in a thread can't be stopped. So every new grammar is compiled here first, and a text is
written by it. A process has a bound on its memory, and is ended when a grammar takes too long. There are a few, so that
one slow grammar holds up no others.

This file is also the program of these processes: it imports nothing of this project.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MOST_AT_ONCE = 4
"""Processes."""
_PATIENCE_S = 5.0
_IDLE_S = 60.0
_NICENESS = 5
_TOO_COMPLEX = "it is too complex"
_MEMORY_BYTES = 2 << 30
_NUM_STEPS = 64
_SPECIAL = re.compile(r"<\[(\d+)\]>")
"""A special token as grammars write it."""
_SLOW_S = 0.1
"""No grammar that can be used takes so much of a processor's time over a token."""


def limits() -> LLParserLimits:
    """llguidance's own: of the work of compiling, and of one mask, which takes some 20 ms at the most."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False)


class GrammarCheck:
    """The processes. One is started where none is free, and ends with this object, or when it had nothing to do."""

    def __init__(self, patience_s: float = _PATIENCE_S, idle_s: float = _IDLE_S) -> None:
        self._patience_s = patience_s
        self._idle_s = idle_s
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._free: list[_Process] = []
        """Whichever was used last comes last, and is used next, so that those that are not needed become idle."""

    def refusal(self, source: str) -> str:
        """Returns why a grammar, as llguidance reads it, cannot be used; empty if it can. Several threads may ask."""
        with self._places:
            while True:
                process = self._take()
                try:
                    answer = process.ask(source, self._patience_s)
                except EOFError:
                    if process.was_idle():
                        continue
                    return _TOO_COMPLEX
                if answer is None:
                    process.end()
                    return _TOO_COMPLEX
                self._free.append(process)
                return answer

    def _take(self) -> _Process:
        try:
            return self._free.pop()
        except IndexError:
            return _Process(self, self._idle_s)


class _Process:
    """One process; it ends with `owner`."""

    def __init__(self, owner: GrammarCheck, idle_s: float) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", __file__, str(idle_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what the terminal sends to the server is not for it
        )
        self.end = weakref.finalize(owner, _kill, self._popen)
        # Whenever it ends, it is reaped.
        threading.Thread(target=self._popen.wait, name="grammar-check", daemon=True).start()
        try:
            has_started = self._answer(10 * _PATIENCE_S) is not None
        except EOFError:
            has_started = False
        if not has_started:
            self.end()
            raise RuntimeError("the process that checks grammars did not start")

    def ask(self, source: str, patience_s: float) -> str | None:
        """Returns the process's answer on a grammar; None if there is none in time.

        Raises:
            EOFError: it has ended.
        """
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(source).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        return self._answer(patience_s)

    def was_idle(self) -> bool:
        """Returns whether the process ended because it had nothing to do."""
        is_so = self._popen.wait() == 0
        self.end()
        return is_so

    def _answer(self, patience_s: float) -> str | None:
        assert self._popen.stdout is not None
        with DefaultSelector() as selector:
            selector.register(self._popen.stdout, EVENT_READ)
            if not selector.select(patience_s):
                return None
        if not (line := self._popen.stdout.readline()):
            raise EOFError
        return str(json.loads(line))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# A process


_NUM_PLAIN = 257
"""The bytes and the end of a text."""


class _Vocabulary:
    """A token a byte, the end, and special tokens, as llguidance asks for a vocabulary (its TokenizerWrapper)."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, num_special: int) -> None:
        self.special_token_ids = list(range(256, _NUM_PLAIN + num_special))
        self.tokens = [bytes([i]) for i in range(256)] + [b"<%d>" % i for i in self.special_token_ids]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _check(source: str) -> str:
    """Compiles a grammar over bytes and its own special tokens, and follows it for a while, one after another."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    special = list(dict.fromkeys(_SPECIAL.findall(source)))
    source = _SPECIAL.sub(lambda found: f"<[{_NUM_PLAIN + special.index(found[1])}]>", source)
    vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(len(special))))
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits())
    pace, slowest = random.Random(0), 0.0
    for _ in range(_NUM_STEPS):
        if matcher.is_stopped():
            break
        started = time.process_time()
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
        if allowed:
            matcher.consume_token(pace.choice(allowed))
        slowest = max(slowest, time.process_time() - started)
    if matcher.is_error():
        return matcher.get_error() or "it can't be followed"
    return _TOO_COMPLEX if slowest > _SLOW_S else ""


def _serve(idle_s: float) -> None:
    """Answers one request a line, until none came for so long."""
    import os
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    os.nice(_NICENESS)
    _say(_check('start: "a"'))
    with DefaultSelector() as selector:
        selector.register(sys.stdin, EVENT_READ)
        while selector.select(idle_s) and (line := sys.stdin.readline()):
            _say(_check(json.loads(line)))


def _say(text: str) -> None:
    print(json.dumps(text), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
