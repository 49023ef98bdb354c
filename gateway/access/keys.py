"""Who is it: API keys, the tenants they belong to, and how much those may use."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from gateway.http.errors import unauthorized
from gateway.store.interface import Quota
from priority.lanes import Tenant

OPEN_TENANT = Tenant(name="default")
"""The one tenant of a server without keys."""
UNBOUNDED = Quota()


@dataclass(frozen=True, slots=True)
class Client:
    """Whose key it is, and how much its tenant may use."""

    tenant: Tenant
    quota: Quota = UNBOUNDED


_OPEN_CLIENT = Client(OPEN_TENANT)


def digest_of(key: str) -> bytes:
    """What a key is kept as; the key itself is neither stored nor logged."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The configured keys, by their SHA-256 digests; if there never were any, everybody is let in."""

    def __init__(self, clients: Mapping[bytes, Client | Tenant] | None = None) -> None:
        """`clients` maps the digest of a key to its client, or to a tenant without a quota."""
        self._open = not clients
        self._clients = _as_clients(clients or {})

    def replace(self, clients: Mapping[bytes, Client]) -> None:
        """From now on these keys are let in and no others; without any, nobody is."""
        self._open = False
        self._clients = dict(clients)

    def client(self, authorization: str | None, api_key: str | None = None) -> Client:
        """The client that an Authorization header belongs to, or the key of an `x-api-key` header where that is all.

        Raises:
            ApiError: 401, if keys are configured and this is none of them.
        """
        if self._open:
            return _OPEN_CLIENT
        scheme, _, key = (authorization or f"Bearer {api_key or ''}").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        found = self._find(digest_of(key.strip()))
        if found is None:
            raise unauthorized("Incorrect API key provided.")
        return found

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant of `client`; raises like it."""
        return self.client(authorization).tenant

    def client_of(self, tenant: str) -> Client:
        """A client of the tenant of that name, for work that goes on when its request is over.

        Raises:
            ApiError: 401, if no key of the tenant's is left.
        """
        if self._open:
            return _OPEN_CLIENT
        found = next((client for client in self._clients.values() if client.tenant.name == tenant), None)
        if found is None:
            raise unauthorized("The API key of this tenant is no longer known.")
        return found

    def _find(self, digest: bytes) -> Client | None:
        """Looks at every key, so that the time it takes says nothing about which one was close."""
        found = None
        for known, client in self._clients.items():
            if hmac.compare_digest(known, digest):
                found = client
        return found


def _as_clients(clients: Mapping[bytes, Client | Tenant]) -> dict[bytes, Client]:
    return {
        digest: Client(client) if isinstance(client, Tenant) else client for digest, client in clients.items()
    }
