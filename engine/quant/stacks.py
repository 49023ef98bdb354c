"""Names of tensors that belong to one expert, and of the stack that they are a part of."""

from __future__ import annotations

import re

_EXPERT = re.compile(r"\.experts\.\d+\.")


def stack_of(name: str) -> str:
    """The name of the stack that what belongs to one expert is a part of; of anything else, its own name."""
    return _EXPERT.sub(".experts.", name)
