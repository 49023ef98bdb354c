"""Triton's interpreter without two things that take up to half of its time and find nothing.

It computes whether each sum of integers overflows, and then reports it only when it debugs. And each call of a device
function replaces the functions of `triton.language` again, which the launch around it has replaced already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@dataclass
class _Replaced:
    """The modules whose functions are replaced until the launch that runs is over."""

    replace_in: Callable[[Any], Any]
    modules: set[int]
    scope: Any = None

    def __call__(self, function: Any) -> _Replaced:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if not modules <= self.modules:
            scope = self.replace_in(function)
            self.scope = self.scope or scope
            self.modules |= modules
        return self

    def restore(self) -> None:
        self.scope.restore()
        self.modules.clear()
        self.scope = None


def quicken() -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Replaced(interpreter._patch_lang, set())
