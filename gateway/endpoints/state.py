"""`/internal/state`: what this replica says of itself to the switches in front of it.

One JSON object a line: a snapshot, then changes (see `priority.routing.state`). Each switch holds one of these streams
open. There is such a route only where the operator gave a secret, and only for those who know it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import orjson
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from penstock.gateway.endpoints.intake import Endpoints, Intake
from penstock.gateway.endpoints.operation import LINES, OWN, serves
from penstock.gateway.errors import invalid, unauthorized
from penstock.gateway.service import Service
from penstock.gateway.sessions.prefixes.tracker import MAX_TRACKED
from penstock.priority.routing.state import Change, Load, Snapshot

PATH = "/internal/state"
SECRET_HEADER = "x-penstock-cluster"
EVERY_S = 0.03
"""The shortest time between two pushed changes."""
CALM_S = 0.25
"""The time between two changes of a replica that has no work, or whose streams just go on."""
MOST_BLOCKS = 2048
"""The blocks of one message. What a replica has when the stream opens comes in many, for others have their turn."""
_SWITCH = re.compile(r"[0-9a-f]{1,64}")


class StateQuery(TypedDict):
    switch: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]


class StateApi(Endpoints):
    """The state of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._epoch = secrets.token_hex(8)
        self._load: Load | None = None
        self._load_s = float("-inf")

    @serves(f"GET {PATH}", OWN, query=StateQuery, answers=(LINES,), statuses=(503,))
    async def stream(self, http: HttpRequest) -> Response:
        """Tell a switch of the state of a replica.

        A snapshot comes first, then changes, to the end of the last token stream of a server that drains; without
        `switch`, the snapshot alone.
        """
        check_member(self._service, http)
        switch = http.query_params.get("switch", "")
        if switch and not _SWITCH.fullmatch(switch):
            raise invalid("'switch' must be up to 64 hexadecimal digits.", "switch")
        self._service.dispatch.check_open()
        if not switch:
            with self._service.prefixes.listening(None) as blocks:
                whole = self._snapshot(blocks.take(MAX_TRACKED)[0])
                return Response(state_line(whole), media_type="application/x-ndjson")
        return StreamingResponse(self._lines(switch), media_type="application/x-ndjson")

    async def _lines(self, switch: str) -> AsyncIterator[bytes]:
        service, number = self._service, 0
        with (
            service.prefixes.listening(None) as blocks,
            service.dispatch.tickets.listening(switch, service.options.cluster_secret or "") as let_in,
            service.metrics.switches.track_inprogress(),
        ):
            snapshot = self._snapshot(blocks.take(MOST_BLOCKS)[0])
            sent_load = snapshot.load
            yield state_line(snapshot)
            while not (service.dispatch.draining and not len(service.dispatch)):
                await (asyncio.sleep(0) if blocks.is_behind else self._news(sent_load, let_in))
                number += 1
                load = self._load_now()
                stored, removed = blocks.take(MOST_BLOCKS)
                change = Change(
                    epoch=self._epoch,
                    number=number,
                    load=None if load is sent_load else load,
                    stored=stored,
                    removed=removed,
                    counted=list(let_in),
                )
                sent_load = load
                let_in.clear()
                yield state_line(change)

    async def _news(self, sent_load: Load, let_in: Sequence[int]) -> None:
        """Returns when there is something to tell."""
        waited_s = 0.0
        while waited_s < CALM_S:
            await asyncio.sleep(EVERY_S)
            waited_s += EVERY_S
            if let_in or _requests(self._load_now()) != _requests(sent_load):
                return

    def _load_now(self) -> Load:
        """Returns the load, which is looked at once for all switches."""
        now = asyncio.get_running_loop().time()
        if self._load is None or now - self._load_s >= EVERY_S / 2:
            self._load, self._load_s = self._service.load(), now
        return self._load

    def _snapshot(self, blocks: Sequence[bytes]) -> Snapshot:
        service = self._service
        stats, load = service.engine_stats(), self._load_now()
        return Snapshot(
            replica=service.options.replica,
            epoch=self._epoch,
            model=service.options.identity,
            block_size=service.options.block_size,
            num_kv_tokens=stats.num_kv_tokens,
            max_batch_tokens=stats.max_batch_tokens,
            max_num_seqs=stats.max_num_seqs,
            policies=service.options.policies,
            load=load,
            role=service.options.role,
            blocks=blocks,
        )


def check_member(service: Service, http: HttpRequest) -> None:
    """Raises 401 if whoever asks does not know the cluster's secret."""
    given, secret = http.headers.get(SECRET_HEADER, ""), service.options.cluster_secret or ""
    if not secret or not hmac.compare_digest(given.encode(), secret.encode()):
        raise unauthorized(f"The header '{SECRET_HEADER}' must have the cluster's secret.")


def _requests(load: Load) -> list[object]:
    """Returns the part of a load that changes only when requests come, go or are prefilled."""
    works = load.lanes.values()
    return [
        load.is_draining,
        *((work.num_waiting, work.num_running, work.num_prefill_left) for work in works),
    ]


def state_line(message: Snapshot | Change) -> bytes:
    """Returns a message as `priority.routing.state` reads it."""
    return orjson.dumps(
        message, default=bytes.hex, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    )
