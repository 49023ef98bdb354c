"""Authentication: API keys, the tenants they belong to, and the quotas of those."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256

from penstock.gateway.errors import unauthorized
from penstock.gateway.store.interface import Quota
from penstock.priority.lanes import Tenant

OPEN_TENANT = Tenant(name="default")
"""The one tenant of a server without keys."""
UNBOUNDED = Quota()


@dataclass(frozen=True, slots=True)
class Client:
    """The tenant that a key belongs to, and how much it may use."""

    tenant: Tenant
    quota: Quota = UNBOUNDED
    is_operator: bool = False
    """Whether it may see what other tenants use."""


_OPEN_CLIENT = Client(OPEN_TENANT, is_operator=True)


def digest_of(key: str) -> bytes:
    """Returns the digest that stands for a key; the key itself is neither stored nor logged."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The configured keys, by their SHA-256 digests; if there never were any, everybody is let in."""

    def __init__(self, clients: Mapping[bytes, Client | Tenant] | None = None) -> None:
        """`clients` maps the digest of a key to its client, or to a tenant without a quota."""
        self._salt = secrets.token_bytes(32)
        self.replace(clients or {})
        self._open = not clients

    def replace(self, clients: Mapping[bytes, Client | Tenant]) -> None:
        """Replaces the accepted keys; without any, nobody is let in."""
        self._open = False
        by_digest = {digest: Client(of) if isinstance(of, Tenant) else of for digest, of in clients.items()}
        self._clients = {self._hashed(digest): client for digest, client in by_digest.items()}
        self._by_tenant = {client.tenant.name: client for client in by_digest.values()}

    def client(self, authorization: str | None, api_key: str | None = None) -> Client:
        """Returns the client whose key an Authorization header has, or an `x-api-key` header where that is all.

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
        client = self._clients.get(self._hashed(digest_of(key.strip())))
        if client is None:
            raise unauthorized("Incorrect API key provided.")
        return client

    def tenant(self, authorization: str | None) -> Tenant:
        """Returns the tenant of `client`, and raises like it."""
        return self.client(authorization).tenant

    def client_of(self, tenant: str) -> Client:
        """Returns a client of the tenant of that name, for work that goes on when its request is over.

        Raises:
            ApiError: 401, if no key of the tenant's is left.
        """
        if self._open:
            return _OPEN_CLIENT
        client = self._by_tenant.get(tenant)
        if client is None:
            raise unauthorized("The API key of this tenant is no longer known.")
        return client

    def clients(self) -> list[Client]:
        """Returns a client of every tenant, by name."""
        return [_OPEN_CLIENT] if self._open else [self._by_tenant[name] for name in sorted(self._by_tenant)]

    def _hashed(self, digest: bytes) -> bytes:
        """Hashes a digest with a secret, so that nobody learns of other keys from the time of a lookup."""
        return blake2b(digest, key=self._salt, digest_size=32).digest()
