"""Ids that begin with the tag of the replica that made them, so that a switch knows whom to ask."""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b

TAG_CHARS = 8
_OWNED = re.compile(rf"[a-z]+[-_]([0-9a-f]{{{TAG_CHARS}}})[0-9a-f]+")


def tag_of(replica: str) -> str:
    """The tag of a replica, which is the same for every process of its name."""
    return blake2b(replica.encode(), digest_size=TAG_CHARS // 2).hexdigest()


def owned_id(prefix: str, tag: str, num_chars: int) -> str:
    """A new id, which is the prefix and then so many hexadecimal digits."""
    return prefix + tag + secrets.token_hex((num_chars - TAG_CHARS) // 2)


def tag_in(id: str) -> str | None:
    """The tag of the replica that made this id, if it was made by `owned_id`; None if it cannot be such an id."""
    match = _OWNED.fullmatch(id)
    return match and match[1]
