"""Measures decisions about one input beside chat completions that ask the same of the same server, in turns.

Each of 1 to 400 questions is one of a request for decisions; or a chat completion of one token whose log probabilities
tell of the answers, one after another or 32 at once. The input is new to every turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from penstock.app.bench.server_process import ServerProcess

Row = dict[str, Any]

NUM_QUESTIONS = (1, 10, 100, 400)
NUM_INPUT_TOKENS, ROUNDS, AT_ONCE = 2000, 3, 32
WAYS = ("decisions", "chats", "chats at once")
_WORDS = "the order was late and the parcel came open so please send my money back to me at once "


class DecisionsBench:
    """The turns on one server."""

    def __init__(self, server: ServerProcess, *, quick: bool) -> None:
        self._server = server
        self._rounds = 1 if quick else ROUNDS
        self._numbers = NUM_QUESTIONS[:2] if quick else NUM_QUESTIONS
        self._num_turns = 0
        self._text = ""
        (model,) = self._ask("GET", "/v1/models")["data"]
        self._asked = {"model": model["id"], "service_tier": "flex"}  # nobody is refused for being late

    def rows(self) -> list[Row]:
        """Decisions a second by how many are asked at a time, and the server's processor time of each."""
        self._text = self._fitting()
        self._decide(1)
        self._chat(2, 1)
        return [self._row(number) for number in self._numbers]

    def _row(self, number: int) -> Row:
        ways: dict[str, Callable[[], None]] = {
            "decisions": lambda: self._decide(number),
            "chats": lambda: self._chat(number, 1),
            "chats at once": lambda: self._chat(number, AT_ONCE),
        }
        turns = [{way: self._timed(ask) for way, ask in ways.items()} for _ in range(self._rounds)]
        return {
            "questions": number,
            "per_s": {way: number / median(turn[way][0] for turn in turns) for way in WAYS},
            "cpu_ms": {way: 1000 * median(turn[way][1] for turn in turns) / number for way in WAYS},
        }

    def _timed(self, ask: Callable[[], None]) -> tuple[float, float]:
        """Seconds of wall time, and of the server's processor time, that one turn takes."""
        self._num_turns += 1
        cpu_s, began_s = self._cpu_s(), time.perf_counter()
        ask()
        return time.perf_counter() - began_s, self._cpu_s() - cpu_s

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _decide(self, number: int) -> None:
        questions = [{"type": "predicate", "instructions": self._question(i)} for i in range(number)]
        self._ask("POST", "/v1/decisions", **self._asked, input=self._input(), questions=questions)

    def _chat(self, number: int, at_once: int) -> None:
        text = self._input()
        with ThreadPoolExecutor(at_once) as clients:
            list(
                clients.map(
                    lambda i: self._chat_one(f"{text}\n\n{self._question(i)}\n- Yes\n- No"), range(number)
                )
            )

    def _chat_one(self, content: str) -> None:
        self._ask(
            "POST",
            "/v1/chat/completions",
            **self._asked,
            messages=[{"role": "user", "content": content}],
            max_tokens=1,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
        )

    def _question(self, number: int) -> str:
        return f"Number {number}: does the customer want the money back?"

    def _input(self) -> str:
        """A text that no turn before had."""
        return f"{self._num_turns} {self._text}"

    def _fitting(self) -> str:
        """A text that is of about so many tokens, and leaves room for a question in the context."""
        (model,) = self._ask("GET", "/v1/models")["data"]
        most = min(NUM_INPUT_TOKENS, model["max_model_len"] - 150)
        text = _WORDS * (NUM_INPUT_TOKENS // 8)
        tokens = self._ask("POST", "/tokenize", prompt=text)["count"]
        return text[: len(text) * most // tokens]

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        connection = HTTPConnection(self._server.host, self._server.port)
        try:
            sent = json.dumps(body) if body else None
            connection.request(method, path, sent, {"content-type": "application/json"})
            reply = connection.getresponse()
            told = json.loads(reply.read())
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{path} answered {reply.status}: {told}")
        return told
