"""One request on a socket of its own, noted down as it comes; under locust, gevent makes such sockets take turns."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.app.reader import TimedAnswer, TimedBytes, read_answer, request_bytes

STALL_S = 60.0
"""A server that is silent for so long has failed; it promises a sign of life every few seconds."""

Patience = Callable[[TimedBytes], bool]
"""Looks at what came so far, may wait, and says whether to read on."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and as whom."""

    url: str
    key: str = ""
    """The API key; empty for a server that wants none."""

    def exchange(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        patience: Patience = lambda _: True,
        piece_bytes: int = 65_536,
    ) -> TimedBytes:
        """Sends a request and notes the answer until its end, or until patience does.

        Raises:
            OSError: there is no connection, it broke, or nothing came for STALL_S.
        """
        address = urlsplit(self.url)
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        request = request_bytes(method, path, address.netloc, body, headers)
        recording = TimedBytes(time.perf_counter())
        with socket.create_connection((address.hostname, address.port), STALL_S) as connection:
            connection.sendall(request)
            while data := connection.recv(piece_bytes):
                recording.note(data)
                if recording.is_done or not patience(recording):
                    break
        return recording

    def answer(self, method: str, path: str, body: object = None, *, after_event: int = -1) -> TimedAnswer:
        """Reads the answer of an exchange; whatever goes wrong is in it."""
        started_s = time.perf_counter()
        try:
            return read_answer(self.exchange(method, path, body), after_event)
        except (OSError, ValueError) as error:
            return failed(started_s, error)


def failed(started_s: float, error: Exception) -> TimedAnswer:
    """The answer that did not come, or made no sense."""
    return TimedAnswer(started_s, time.perf_counter(), error=f"{type(error).__name__}: {error}")
