"""Names of tensors that belong to one expert, and of the stack that they are a part of."""

from __future__ import annotations

import re

_EXPERT = re.compile(r"\.experts\.\d+\.")


def stack_of(name: str) -> str:
    """Returns the name of the stack that an expert's part belongs to; for any other name, the name itself."""
    return _EXPERT.sub(".experts.", name)
