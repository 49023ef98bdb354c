"""`Idempotency-Key`: a request that is sent twice is done once, and both are answered with the same reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import TypeVar

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.store.interface import Key, Store, StoreUnavailable
from penstock.gateway.store.records import Records

HEADER = "Idempotency-Key"
RESUMABLE_HEADER = "x-penstock-resumable"
"""The header that asks for a resumable stream; the bodies of some APIs have no field for that."""
KEPT_S = 600.0
MAX_KEY_CHARS = 255

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Claim:
    """A Claim says what a key was used for."""

    digest: str
    """The digest of the request."""
    id: str
    """The id of the reply."""


_CLAIMS = Records("idempotency", Claim, KEPT_S, lambda claim: len(claim.digest))
"""Claims are found by the digest of the key."""
_USED = Records("idempotency_used", str, KEPT_S, len)
"""The digest of the key that a reply was made for is found by the reply's id."""


def idempotency_key(http: HttpRequest) -> str | None:
    """Returns the key that a request has, if any; raises 400 if it is no sensible one."""
    key = http.headers.get(HEADER)
    if key is not None and not (key.isascii() and key.isprintable() and 0 < len(key) <= MAX_KEY_CHARS):
        raise invalid(f"'{HEADER}' must be 1 to {MAX_KEY_CHARS} printable ASCII characters.", HEADER)
    return key


def not_here() -> ApiError:
    message = (
        f"A request with this '{HEADER}' was made before; its reply is made elsewhere, or no longer kept."
    )
    return invalid(message, HEADER, "idempotency_reply_not_here", HTTPStatus.CONFLICT)


class Idempotency:
    """Idempotency knows which reply each tenant's keys of the last minutes belong to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._starting: dict[Key, asyncio.Event] = {}
        """Requests that are about to begin; another one with the same key waits for that."""

    async def once(
        self,
        tenant: str,
        key: str | None,
        body: object,
        reply_id: str,
        make: Callable[[], Awaitable[_Made]],
    ) -> _Made | str:
        """Returns what `make` makes under `reply_id`, or the id of the reply that was made for this key before.

        If nothing is made, because `make` raises, the key is as good as new. Without a key it is made every time.

        Raises:
            ApiError: 400, if the key was used for another request.
        """
        if key is None:
            return await make()
        claim_key = Key(_CLAIMS.kind, tenant, sha256(key.encode()).hexdigest())
        digest = sha256(f"{type(body).__name__} ".encode() + to_json(body)).hexdigest()
        while (starting := self._starting.get(claim_key)) is not None:
            await starting.wait()
        self._starting[claim_key] = asyncio.Event()
        try:
            earlier_id = await self._claim(claim_key, digest, reply_id)
            return await self._make(claim_key, make) if earlier_id is None else earlier_id
        finally:
            self._starting.pop(claim_key).set()

    async def forget(self, tenant: str, reply_id: str) -> None:
        """The reply came to nothing: the key that it was made for, if there was one, is as good as new."""
        with contextlib.suppress(StoreUnavailable):
            if (key_digest := await _USED.get(self._store, tenant, reply_id)) is not None:
                await self._store.delete(Key(_CLAIMS.kind, tenant, key_digest))

    async def _make(self, claim_key: Key, make: Callable[[], Awaitable[_Made]]) -> _Made:
        try:
            return await make()
        except BaseException:
            with contextlib.suppress(StoreUnavailable):
                await self._store.delete(claim_key)
            raise

    async def _claim(self, claim_key: Key, digest: str, reply_id: str) -> str | None:
        try:
            claim = await _CLAIMS.add(self._store, claim_key.tenant, claim_key.id, Claim(digest, reply_id))
        except StoreUnavailable:
            return None
        if claim is None:
            await _USED.put(self._store, claim_key.tenant, reply_id, claim_key.id)
            return None
        if claim.digest != digest:
            message = f"The '{HEADER}' was used before, for another request."
            raise invalid(message, HEADER, "idempotency_key_reused")
        return claim.id
