"""Linear layers in the layout of the native kernels."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from engine.kernels.cpu.library import DTYPES, Team, check, created, float32, pointer


ACTIVATIONS = (torch.float32, torch.bfloat16, torch.int8)
"""By the number that the kernels have for them."""


class _Source(ctypes.Structure):
    _fields_ = [
        ("type", c_int32),
        ("rows", c_int32),
        ("k", c_int32),
        ("gated", c_int32),
        ("group", c_int32),
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
    ]


class PackedLinear:
    """A linear layer in the layout of the kernels; the tensors it was made from can be freed.

    An output is one chain of fused multiply-adds in float32, so that it does not depend on the other rows or on the
    number of threads, bit for bit.

    Args:
        weight: [rows, in]; it is rounded to `dtype`, float32, float16 or bfloat16.
        bias: [rows], or None.
        gated: the first half of the rows are gates and the second ups; the rows / 2 outputs are silu(gate) * up.
    """

    def __init__(
        self, team: Team, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gated: bool = False
    ) -> None:
        self.num_rows, self.in_features = weight.shape
        if gated and self.num_rows % 2:
            raise ValueError(f"gates and ups must be equally many, not {self.num_rows} together")
        if bias is not None and bias.shape != (self.num_rows,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {self.num_rows} outputs")
        self.out_features = self.num_rows // 2 if gated else self.num_rows
        self.dtype = dtype
        self.gated = gated
        self._team = team
        self._apply = team.library.function("penstock_linear_apply")
        self.handle = self._pack(weight, bias)
        weakref.finalize(self, team.library.call, "penstock_linear_free", self.handle)

    @property
    def activation_dtype(self) -> torch.dtype:
        """What the activations are rounded to before they are multiplied: float32, bfloat16 or int8."""
        return ACTIVATIONS[self._team.library.call("penstock_linear_form", self.handle)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, padding included."""
        return int(self._team.library.call("penstock_linear_bytes", self.handle))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies the rows of x, float32 [M, in], by the layer: float32 [M, out]."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"float32 [M, {self.in_features}] expected, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, self.out_features))
        check(
            self._apply(self._team.handle, self.handle, x.data_ptr(), self.in_features, num_rows, out.data_ptr())
        )
        return out

    def dense(self) -> Tensor:
        """The weights as they were given, [rows, in], rounded to `dtype` and widened to float32."""
        out = torch.empty((self.num_rows, self.in_features))
        self._team.library.call("penstock_linear_unpack", self._team.handle, self.handle, out.data_ptr())
        return out

    def _pack(self, weight: Tensor, bias: Tensor | None) -> int:
        source = weight.detach().to("cpu", self.dtype).contiguous()
        biases = None if bias is None else float32(bias)
        given = _Source(
            type=DTYPES[self.dtype],
            rows=self.num_rows,
            k=self.in_features,
            gated=self.gated,
            group=self.in_features,
            weight=source.data_ptr(),
            bias=pointer(biases),
        )
        return created(
            self._team.library.call("penstock_linear_new", self._team.handle, ctypes.byref(given))
        )
