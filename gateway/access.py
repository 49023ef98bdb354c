"""Who is it: API keys and the tenants they belong to."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256

from gateway.errors import unauthorized
from priority.lanes import Tenant

OPEN_TENANT = Tenant(name="default")
"""The one tenant of a server without keys."""


def digest_of(key: str) -> bytes:
    """What a key is kept as; the key itself is neither stored nor logged."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The configured keys, by their SHA-256 digests; without any, everybody is let in."""

    def __init__(self, tenants: Mapping[bytes, Tenant] | None = None) -> None:
        """`tenants` maps the digest of a key to its tenant."""
        self._tenants = dict(tenants or {})

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant that an Authorization header belongs to.

        Raises:
            ApiError: 401, if keys are configured and this is none of them.
        """
        if not self._tenants:
            return OPEN_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthorized("You didn't provide an API key. Send it as 'Authorization: Bearer KEY'.")
        found = self._find(digest_of(key.strip()))
        if found is None:
            raise unauthorized("Incorrect API key provided.")
        return found

    def _find(self, digest: bytes) -> Tenant | None:
        """Looks at every key, so that the time it takes says nothing about which one was close."""
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found
