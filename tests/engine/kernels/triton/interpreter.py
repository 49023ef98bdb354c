"""Triton's interpreter without what takes most of its time and finds nothing.

It computes whether each sum of integers overflows, and then reports it only when it debugs. Each launch, and each call
of a device function, replaces the functions of `triton.language` by interpreted ones, and a launch puts them back. The
numpy type of a Triton type is looked up in a dictionary that is made for each lookup. And the shape of every result is
checked and wrapped again, number by number, of which a program has few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@dataclass
class _Replaced:
    """Replaces the functions of modules, once for the whole process: no test in it runs a compiled kernel."""

    replace_in: Callable[[Any], Any]
    modules: set[int] = field(default_factory=set)
    functions: set[Any] = field(default_factory=set)
    """The kernels whose modules have been looked through."""

    def __call__(self, function: Any) -> _Replaced:
        if function not in self.functions:
            self.functions.add(function)
            modules = {
                id(value) for value in function.__globals__.values() if value is tl or value is tl.core
            }
            if not modules <= self.modules:
                self.replace_in(function)
                self.modules |= modules
        return self

    def restore(self) -> None:
        """A launch is over."""


@dataclass
class _NumpyTypes:
    """Finds the numpy type of a Triton type by its name."""

    find: Callable[[Any], np.dtype[Any]]
    types: dict[str, np.dtype[Any]] = field(default_factory=dict)

    def __call__(self, type: Any) -> np.dtype[Any]:
        name = type.scalar.name
        if name not in self.types:
            self.types[name] = self.find(type)
        return self.types[name]


class _Shapes:
    """Makes the shape of a type of blocks, and that of their tensors, once."""

    def __init__(self) -> None:
        self._of_types: dict[tuple[str, tuple[Any, ...]], tuple[Any, int, str]] = {}
        self._of_tensors: dict[str, tuple[Any, Any]] = {}
        self._make_type, self._make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__

    def make_type(self, own: Any, element: Any, shape: Any) -> None:
        """Stands in for `block_type.__init__`."""
        key = element.name, tuple(shape)
        if key not in self._of_types:
            self._make_type(own, element, shape)
            self._of_types[key] = own.shape, own.numel, own.name
        own.element_ty = element
        own.shape, own.numel, own.name = self._of_types[key]

    def make_tensor(self, own: Any, handle: Any, type: Any) -> None:
        """Stands in for `tensor.__init__`."""
        if type.name not in self._of_tensors:
            self._make_tensor(own, handle, type)
            self._of_tensors[type.name] = own.shape, own.numel
        own.handle, own.type, own.dtype = handle, type, type.scalar
        own.shape, own.numel = self._of_tensors[type.name]


def quicken() -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Replaced(interpreter._patch_lang)
    interpreter._get_np_dtype = _NumpyTypes(interpreter._get_np_dtype)
    shapes = _Shapes()
    tl.core.block_type.__init__ = lambda own, element_ty, shape: shapes.make_type(own, element_ty, shape)
    tl.core.tensor.__init__ = lambda own, handle, type: shapes.make_tensor(own, handle, type)
