"""Measures what a picker that scrapes /metrics 20 times a second costs a server.

First the server is idle, and its processor time tells. Then streams run all the time, and the picker scrapes in every
other window.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import ModuleRunner
from penstock.app.bench.server_process import ServerProcess

Row = dict[str, Any]

SCRAPES_PER_S = 20
STREAMS, TOKENS = 32, 200
NUM_PAIRS, WINDOW_S = 20, 3.0
_START_S = 5.0
"""The time within which the process of the streams has begun them."""
_OUTPUT_TOKENS = re.compile(r"^penstock_output_tokens_total (\S+)$", re.MULTILINE)


class ScrapeBench:
    """The windows on one server."""

    def __init__(self, server: ServerProcess, model: str, run: ModuleRunner, *, quick: bool) -> None:
        self._server = server
        self._model = model
        self._run = run
        self._num_pairs = 1 if quick else NUM_PAIRS
        self._window_s = WINDOW_S / 3 if quick else WINDOW_S

    def row(self) -> Row:
        """Returns tokens a second with and without a picker, and the median ratio of neighbouring windows."""
        cpu_ms = self._cpu_ms()
        with self._streaming(), contextlib.closing(self._connect()) as connection:
            before = self._num_tokens(connection)
            while self._num_tokens(connection) == before:
                time.sleep(0.1)
            pairs = [self._pair(connection, number) for number in range(self._num_pairs)]
        return {
            "streams": STREAMS,
            "scrapes_per_s": SCRAPES_PER_S,
            "without": median(without for without, _ in pairs),
            "scraped": median(scraped for _, scraped in pairs),
            "ratio": median(scraped / without for without, scraped in pairs),
            "cpu_ms": cpu_ms,
        }

    def _cpu_ms(self) -> float:
        """Returns the processor time of a scrape, HTTP included, beyond what the idle server takes."""
        with contextlib.closing(self._connect()) as connection:
            self._scrape(connection)
            (idle_s, _), (scraped_s, num_scrapes) = (
                self._spent(connection, is_scraped=is_scraped) for is_scraped in (False, True)
            )
        return 1000 * (scraped_s - idle_s) / num_scrapes

    def _spent(self, connection: HTTPConnection, *, is_scraped: bool) -> tuple[float, int]:
        """Returns the server's processor time in a window, and how often it was scraped."""
        before_s = self._cpu_s()
        num_scrapes = self._pass_window(connection, is_scraped=is_scraped)
        return self._cpu_s() - before_s, num_scrapes

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _pair(self, connection: HTTPConnection, number: int) -> tuple[float, float]:
        """Returns the tokens a second of a window without and of one with a picker, in either order."""
        windows = [self._window(connection, is_scraped=(number + i) % 2 == 1) for i in range(2)]
        without, scraped = windows if number % 2 == 0 else reversed(windows)
        return without, scraped

    def _window(self, connection: HTTPConnection, *, is_scraped: bool) -> float:
        before, began_s = self._num_tokens(connection), time.perf_counter()
        self._pass_window(connection, is_scraped=is_scraped)
        return (self._num_tokens(connection) - before) / (time.perf_counter() - began_s)

    def _pass_window(self, connection: HTTPConnection, *, is_scraped: bool) -> int:
        """Waits for the end of a window, and returns how often it scraped meanwhile."""
        began_s = time.perf_counter()
        num_scrapes = round(self._window_s * SCRAPES_PER_S) if is_scraped else 0
        for number in range(num_scrapes):
            time.sleep(max(0.0, began_s + number / SCRAPES_PER_S - time.perf_counter()))
            self._scrape(connection)
        time.sleep(max(0.0, began_s + self._window_s - time.perf_counter()))
        return num_scrapes

    def _num_tokens(self, connection: HTTPConnection) -> float:
        counted = _OUTPUT_TOKENS.search(self._scrape(connection).decode())
        assert counted is not None
        return float(counted[1])

    def _scrape(self, connection: HTTPConnection) -> bytes:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()

    def _connect(self) -> HTTPConnection:
        return HTTPConnection(self._server.host, self._server.port)

    @contextlib.contextmanager
    def _streaming(self) -> Iterator[None]:
        """While this is entered, streams run; they end by themselves."""
        body = {
            "model": self._model,
            "prompt": "Once upon a time",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "service_tier": "flex",  # nobody is refused for being late
        }
        stop_s = 2 * self._num_pairs * self._window_s + _START_S
        bodies: list[list[dict[str, object]]] = [[body] * 1_000 for _ in range(STREAMS)]
        job = Job(self._server.host, self._server.port, "/v1/completions", bodies, stop_s=stop_s)
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(ask, self._run, job)
            yield
            failed = [answer.error for answer in streaming.result() if answer.error]
        assert not failed, failed[0]
