"""The file of API keys: one key a line; blank lines and lines with a # in front are passed over.

A line has the name of a tenant and the SHA-256 of its key, and after it may stand what the tenant is entitled to:

    alice:sha256:DIGEST weight=1 lane=standard top=interactive rpm=60 tpm=100000 streams=8

`weight` is its share among tenants, `lane` the lane of its requests that name none, or `auto` to let the server choose,
as it does where `lane` is missing. `top` is the most urgent lane that it may have: the interactive one, where it is
missing. `rpm` bounds its requests per minute, `tpm` its prompt and output tokens per minute, `rpd` and `tpd` the same
per day, `rpmonth` and `tpmonth` per month (days and months of UTC), `streams` its requests at work at a time; each is
unbounded where it is missing. `role=operator` lets it see what other tenants use.
Several lines may have the same name, so that a key can be replaced without a pause: they must say the same of their
tenant. `penstock key` makes such lines.

The file is read again when it changes: put the new one in place in one go (`mv`), so that no half of it is read.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import logging
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.app.errors import OperatorError
from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Lane, Tenant, parse_lane

log = logging.getLogger("penstock.keys")

KEY_PREFIX = "sk-penstock-"
_SHORTEST_KEY = 16
_LARGEST_BOUND = 1_000_000_000
_LARGEST_LONG_BOUND = 1_000_000_000_000
_LONG_BOUNDS = ("tpd", "tpmonth")
_NAME = re.compile(r"[^\s:#][^\s:]*")
_ENTRY = re.compile(rf"({_NAME.pattern}):sha256:([0-9a-fA-F]{{64}})")
_BOUNDS = {
    "rpm": "requests_per_minute",
    "tpm": "tokens_per_minute",
    "rpd": "requests_per_day",
    "tpd": "tokens_per_day",
    "rpmonth": "requests_per_month",
    "tpmonth": "tokens_per_month",
    "streams": "max_streams",
}
_ROLES = ("tenant", "operator")
_WANTED = "`NAME:sha256:DIGEST`; `penstock key NAME --hash` makes that line from a key, `penstock key NAME` a new key"
_ATTRIBUTES = f"weight=, lane=, top=, {', '.join(f'{bound}=' for bound in _BOUNDS)} and role="

_Signature = tuple[int, int, int]


class KeyFile:
    """The file of keys, and whether it changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: _Signature | None = None

    def read(self) -> dict[bytes, Client]:
        """Client by digest of its key.

        Raises:
            OperatorError: naming the file, and the line that is wrong.
        """
        # Looked at before it is read: what is written in between is a change.
        self._seen = self._signature()
        return _parse_lines(self._lines(), self._path)

    def read_changed(self) -> dict[bytes, Client] | None:
        """Like `read`, if the file is not the one that was read last; else None."""
        return None if self._signature() == self._seen else self.read()

    async def watch(self, on_change: Callable[[dict[bytes, Client]], None], period_s: float = 1.0) -> None:
        """Calls back with the new keys whenever the file changed, until cancelled; a broken file changes nothing."""
        while True:
            await asyncio.sleep(period_s)
            try:
                clients = await asyncio.to_thread(self.read_changed)
                if clients is not None:
                    on_change(clients)
                    log.info(
                        "%s was read again: %d keys of %d tenants",
                        self._path, len(clients), len(weights_of(clients.values())),
                    )  # fmt: skip
            except OperatorError as error:
                log.warning("%s; the keys that were read before stay", error)
            except Exception:
                log.exception("reading %s again failed; going on", self._path)

    def _signature(self) -> _Signature | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise OperatorError(f"--api-keys-file {self._path}: {reason}") from None


def weights_of(clients: Iterable[Client]) -> dict[str, int]:
    """Share by name of the tenant."""
    return {client.tenant.name: client.tenant.weight for client in clients}


def _parse_lines(lines: Iterable[str], path: Path) -> dict[bytes, Client]:
    clients: dict[bytes, Client] = {}
    first: dict[str, tuple[int, Client]] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        where = f"--api-keys-file {path}, line {number}"
        try:
            digest, client = _parse(text)
        except ValueError as error:
            raise OperatorError(f"{where}: {error}") from None
        if clients.get(digest, client).tenant.name != client.tenant.name:
            raise OperatorError(f"{where}: another tenant has this key already")
        number_before, before = first.setdefault(client.tenant.name, (number, client))
        if before != client:
            raise OperatorError(f"{where}: says otherwise of {client.tenant.name} than line {number_before}")
        clients[digest] = client
    if not clients:
        raise OperatorError(f"--api-keys-file {path}: there is no key in it")
    return clients


def _parse(text: str) -> tuple[bytes, Client]:
    """The digest of a line and whose it is. What is no digest may be a key, and is not repeated in the ValueError."""
    entry, *attributes = text.replace(" :", ":").replace(": ", ":").split()
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"not {_WANTED}")
    return bytes.fromhex(match[2]), _client(match[1], attributes)


def _client(name: str, attributes: Iterable[str]) -> Client:
    entitlements: dict[str, Any] = {}
    bounds: dict[str, int] = {}
    role = "tenant"
    for attribute, value in _pairs(attributes).items():
        if attribute == "weight":
            entitlements["weight"] = _whole(attribute, value)
        elif attribute == "top":
            entitlements["top_lane"] = _lane(attribute, value)
        elif attribute == "lane":
            entitlements["default_lane"] = None if value == "auto" else _lane(attribute, value)
        elif attribute == "role":
            role = _role(value)
        else:
            bounds[_BOUNDS[attribute]] = _bound(attribute, value)
    return Client(Tenant(name=name, **entitlements), Quota(**bounds), is_operator=role == "operator")


def _pairs(attributes: Iterable[str]) -> Mapping[str, str]:
    pairs: dict[str, str] = {}
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        if name not in ("weight", "lane", "top", "role", *_BOUNDS):
            raise ValueError(f"after the key may stand {_ATTRIBUTES}, without spaces around the =")
        if name in pairs:
            raise ValueError(f"{name} stands there twice")
        pairs[name] = value
    return pairs


def _lane(name: str, value: str) -> Lane:
    try:
        return parse_lane(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _role(value: str) -> str:
    if value not in _ROLES:
        raise ValueError(f"role must be {' or '.join(_ROLES)}, not {value!r}")
    return value


def _whole(name: str, value: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _bound(name: str, value: str) -> int:
    bound, most = _whole(name, value), _LARGEST_LONG_BOUND if name in _LONG_BOUNDS else _LARGEST_BOUND
    if not 0 < bound <= most:
        raise ValueError(f"{name} must be 1 to {most}, not {bound}")
    return bound


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the tenant who gets the key")
    parser.add_argument(
        "attributes",
        nargs="*",
        default=[],
        metavar="ATTRIBUTE",
        help=f"what the tenant is entitled to: {_ATTRIBUTES}",
    )
    parser.add_argument(
        "--hash",
        action="store_true",
        help="read the key from standard input, without echo, instead of making one",
    )


def run(options: argparse.Namespace) -> int:
    """The line goes to standard output, for the end of the file of keys; a new key is shown on standard error, once."""
    key = _ask() if options.hash else KEY_PREFIX + secrets.token_urlsafe(32)
    line = " ".join([f"{options.name}:sha256:{digest_of(key).hex()}", *options.attributes])
    if not _NAME.fullmatch(options.name):
        raise OperatorError("NAME must be without spaces and colons, and must not begin with a #")
    try:
        _parse(line)
    except ValueError as error:
        raise OperatorError(str(error)) from None
    if not options.hash:
        print(f"the key, shown this once: {key}", file=sys.stderr, flush=True)
    print(line)
    return 0


def _ask() -> str:
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise OperatorError(f"a key is at least {_SHORTEST_KEY} ASCII characters without spaces")
    return key
