"""The connection to Redis: never in the way. Every call is bounded, and while Redis is gone none is tried."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.gateway.store.interface import StoreUnavailable
from penstock.gateway.store.scripts import SCRIPTS
from penstock.gateway.store.time_budget import NUM_CHECKS, TIME_BUDGET, TimeBudget

MAX_COMMANDS = 100
"""The number of commands that are sent together."""
BATCH_BYTES = 1024 * 1024
"""What is written in one call has so many bytes at most, or is one thing: 8 ms at 1 Gbit a second."""
MAX_CONNECTIONS = 8
POOL_WAIT_S = 0.05
WORK_S = 0.08
"""A call may use so much of `MAX_WAIT_S`; the rest is for ending it."""
MAX_LATE = 2
"""A call is given up when so many times its checks came late because this process did; Redis is not to blame then."""

MAX_FAILURES = 5
"""The breaker opens after so many failures in a row."""
PROBE_S = 1.0
"""Nothing is asked for at least so long after the breaker opened, and at most for twice as long."""
_BACKSTOP_S = 5.0
"""Every call is given up long before; this is for what nobody waits for."""

Argument: TypeAlias = str | bytes | int | float
Command: TypeAlias = tuple[Argument, ...]
"""A Command may call a script, by its SHA-1; the script is sent as a whole only if Redis does not have it."""
_Item = TypeVar("_Item")
log = logging.getLogger("penstock.store")


def batch_of(sizes: Iterable[int], most: int = MAX_COMMANDS) -> int:
    """Returns how many things of these sizes go in one call: as many as are written in time, and at least one."""
    number = num_bytes = 0
    for size in sizes:
        num_bytes += size
        if number and (number >= most or num_bytes > BATCH_BYTES):
            break
        number += 1
    return number


def batched(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yields the items, so many at a time as go in one call."""
    return (items[start : start + MAX_COMMANDS] for start in range(0, len(items), MAX_COMMANDS))


class Breaker:
    """A closed breaker lets all ask, an open one none, and a half open one a single call, whose answer decides."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """`jitter` gives numbers from 0 to 1, so that many servers do not ask at the same moment."""
        self.state: Literal["closed", "open", "half_open"] = "closed"
        self._jitter = jitter
        self._num_failures = 0
        self._probe_s = 0.0

    def may_call(self, now_s: float) -> bool:
        """Says whether a call may be made, which then ends with one of `succeeded`, `failed` and `abandoned`."""
        if self.state == "closed":
            return True
        if self.state == "half_open" or now_s < self._probe_s:
            return False
        self.state = "half_open"
        return True

    def succeeded(self) -> None:
        """Closes the breaker, also for a call from before it opened: Redis answered, after all."""
        self.state = "closed"
        self._num_failures = 0

    def failed(self, now_s: float, *, refused: bool = False) -> None:
        """Counts a failure; if the connection was `refused`, nobody is there, and the breaker opens at once."""
        self._num_failures += 1
        if self.state == "half_open" or (
            self.state == "closed" and (refused or self._num_failures >= MAX_FAILURES)
        ):
            self.state = "open"
            self._probe_s = now_s + PROBE_S * (1 + self._jitter())

    def abandoned(self, now_s: float) -> None:
        """Lets the next call ask instead: nobody waits for this one's answer any more."""
        if self.state == "half_open":
            self.state = "open"
            self._probe_s = now_s


class Link:
    """A Link leads to the Redis at a URL."""

    def __init__(
        self,
        url: str,
        *,
        client_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects later; raises ValueError if the URL is none."""
        self.num_losses = 0
        self.num_calls = 0
        self.num_rejected = 0
        self.failures: Counter[str] = Counter()
        self.breaker = Breaker()
        self._clock = clock
        self._num_successes = 0
        self._run_id: bytes | None = None
        options: dict[str, Any] = {
            "client_name": client_name,
            "protocol": 2,
            "decode_responses": False,
            "encoding_errors": "surrogatepass",
            "socket_timeout": _BACKSTOP_S,
            "socket_connect_timeout": _BACKSTOP_S,
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": self._on_connect,
        }
        pool: dict[str, Any] = {"max_connections": MAX_CONNECTIONS, "timeout": POOL_WAIT_S}
        self._pool = BlockingConnectionPool(**{**pool, **parse_url(url), **options})
        self._client = Redis(connection_pool=self._pool)
        self._client.response_callbacks.clear()

    async def one(self, command: Command) -> Any:
        """Asks Redis, which answers with bytes, int, None or a list of these.

        Raises:
            StoreUnavailable: Redis did not answer in time, refused the command, or is known to be gone.
        """
        return (await self.all([command]))[0]

    async def all(self, commands: Sequence[Command]) -> list[Any]:
        """Asks all of them, `MAX_COMMANDS` at a time; raises like `one`, and then some may be done."""
        if not commands:
            return []
        budget = TIME_BUDGET.get() or TimeBudget()
        if not (budget.num_checks and self.breaker.may_call(self._clock())):
            self.num_rejected += 1
            raise StoreUnavailable("Redis is gone, or this request has waited for it long enough")
        self.num_calls += 1
        num_successes = self._num_successes
        task = asyncio.create_task(self._ask_in_pieces(commands))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may look at it
        try:
            answers = await self._answers(task, budget)
        except (RedisError, OSError) as error:
            self._failed(error, is_news=num_successes == self._num_successes)
            raise StoreUnavailable(f"Redis: {_kind(error)}") from error
        except BaseException:  # this process was late, or nobody waits for the answer any more
            self.breaker.abandoned(self._clock())
            raise
        finally:
            task.cancel()  # redis-py closes a connection that is left in the middle of an answer
        self._succeeded()
        return answers

    async def _answers(self, task: asyncio.Task[list[Any]], budget: TimeBudget) -> list[Any]:
        """Waits for the task as long as the budget lasts.

        A check that came late itself is not spent: the answer may have come meanwhile, and lie there unread.

        Raises:
            TimeoutError: the budget is spent.
            StoreUnavailable: this process was late too often.
        """
        check_s, num_late, most_late = WORK_S / NUM_CHECKS, 0, MAX_LATE * budget.num_checks
        while budget.num_checks:
            begun_s = self._clock()
            await asyncio.wait([task], timeout=check_s)
            if task.done():
                return task.result()
            if self._clock() - begun_s <= 2 * check_s:
                budget.num_checks -= 1
            elif (num_late := num_late + 1) == most_late:
                budget.num_checks = 0
                raise StoreUnavailable("this process was late")
        raise TimeoutError

    async def _ask_in_pieces(self, commands: Sequence[Command]) -> list[Any]:
        answers: list[Any] = []
        for some in batched(commands):
            answers += await self._ask(some)
        return answers

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        answers = await self._exchange(commands)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        whole = [("EVAL", SCRIPTS[str(commands[i][1])], *commands[i][2:]) for i in unknown]
        for i, answer in zip(unknown, await self._exchange(whole), strict=True):
            answers[i] = answer
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        return answers

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Sends all of them at once; a command that Redis refused has its error among the answers."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def _on_connect(self, connection: AbstractConnection) -> None:
        """Notices a Redis that is another process than before: it may have lost what the last one had."""
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        info = await cast(Awaitable[bytes], connection.read_response())
        run_id = next((line for line in info.splitlines() if line.startswith(b"run_id:")), b"not told")
        if self._run_id is not None and run_id != self._run_id:
            self.num_losses += 1
        self._run_id = run_id

    def _succeeded(self) -> None:
        self._num_successes += 1
        if self.breaker.state != "closed":
            log.warning("Redis is back")
        self.breaker.succeeded()

    def _failed(self, error: BaseException, *, is_news: bool) -> None:
        """Counts a failure, which is no news if another call succeeded since this one was asked: it was too much.

        Nor is a connection that did not become free: those that hold one say how it stands with Redis.
        """
        kind = _kind(error)
        self.failures[kind] += 1
        if not is_news or kind == "pool":
            self.breaker.abandoned(self._clock())
            return
        was_closed = self.breaker.state == "closed"
        self.breaker.failed(self._clock(), refused=kind == "refused")
        if was_closed and self.breaker.state == "open":
            log.warning("Redis is gone (%s): memory stands in for it", kind)

    async def aclose(self) -> None:
        """Closes all connections, those of calls in progress too."""
        await self._pool.disconnect()


def _kind(error: BaseException) -> str:
    if isinstance(error, ResponseError):
        return "response"
    if str(error) == "No connection available.":
        return "pool"
    if isinstance(error, (TimeoutError, RedisTimeoutError)):
        return "timeout"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
            return "refused"
        cause = cause.__cause__ or cause.__context__
    return "connection"
