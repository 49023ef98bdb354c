"""`penstock top`: who takes a running server, live, from its `/v1/events`."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.app.errors import OperatorError, TransientError
from penstock.app.remote import KEY_VARIABLE, checked, connect, key_headers
from penstock.app.tables import number, percent, table

_CLEAR = "\x1b[H\x1b[J"
_PATH = "/v1/events?detail=tenants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help=f"the server; its key is read from {KEY_VARIABLE}, and one with role=operator sees all tenants",
    )
    parser.add_argument("--once", action="store_true", help="print the present state and exit")


def run(options: argparse.Namespace) -> int:
    url, server = checked(options.url), {}
    clear = _CLEAR if sys.stdout.isatty() and not options.once else ""
    for kind, data in _events(url):
        if kind == "server":
            server = data
        elif kind == "tenants":
            print(clear + screen(url, server, data), end="\n" if clear else "\n\n", flush=True)
            if options.once:
                return 0
    raise TransientError(f"{url} ended the connection")


def screen(url: str, server: Mapping[str, Any], tenants: Mapping[str, Any]) -> str:
    """Returns the server's state, its tenants and its lanes, as text."""
    head = f"{url}  {server['state']}: "
    if (engine := server.get("engine")) is None:  # the key is no operator's
        head += f"{server['streams']} requests of your own"
    else:
        used = 1 - engine["kv_free_blocks"] / max(1, engine["kv_blocks"])
        head += (
            f"{engine['running']} running, {engine['waiting']} waiting, {percent(used)} of KV blocks in use"
        )
    return "\n\n".join((head, _tenants(tenants), _lanes(server["lanes"])))


def _tenants(told: Mapping[str, Any]) -> str:
    others = told["others"]
    named = [(one["tenant"], one) for one in told["tenants"]]
    if others["tenants"]:
        named.append((f"({others['tenants']} others)", others))
    rows = [
        [name, percent(one["share"]), *(str(one[figure]) for figure in ("waiting", "running", "refused"))]
        for name, one in named
    ]
    return table(["tenant", "work, last minute", "waiting", "running", "refused, last minute"], rows)


def _lanes(lanes: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            number(lane.get("waiting")),
            number(lane["forecast_ttft_ms"], 0.001),
            number(lane["promised_ttft_ms"], 0.001),
            percent(lane.get("attainment")),
            _interval(lane.get("coverage")),
        ]
        for name, lane in lanes.items()
    ]
    return table(["lane", "waiting", "first token in, s", "promised, s", "kept", "95 % interval"], rows)


def _interval(coverage: Mapping[str, Any] | None) -> str:
    return f"{percent(coverage['low'])} to {percent(coverage['high'])}" if coverage else "-"


def _events(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the server's events until it ends the connection; raises OperatorError if it sends none."""
    connection = connect(url)
    try:
        connection.request("GET", urlsplit(url).path + _PATH, headers=key_headers())
        reply = connection.getresponse()
        if reply.status != http.HTTPStatus.OK:
            hint = f"; put a key into {KEY_VARIABLE}" if reply.status == http.HTTPStatus.UNAUTHORIZED else ""
            raise OperatorError(f"{url}{_PATH}: HTTP {reply.status}{hint}")
        kind = ""
        for line in reply:
            name, _, value = line.decode().strip().partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)
    except (OSError, http.client.HTTPException) as error:
        raise TransientError(f"{url} does not answer: {error}") from None
    finally:
        connection.close()
