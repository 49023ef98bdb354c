"""Quantizes weights as other programs do, by the libraries of the formats where they run on a CPU.

GPTQ, AWQ and torchao's int4 have no such library; numpy packs these here, number by number, as their documents say. A
maker turns a weight into what a checkpoint stores of it, and what that stands for by the library's own account.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchao.quantization as ao
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int4Tensor

Config = dict[str, Any]
INT4 = torch.int4  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Made:
    """The tensors that a checkpoint stores of a weight, by suffix, and the weight that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


Maker = Callable[[Tensor], Made]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store a checkpoint."""

    config: Config
    """The quantization_config."""
    make: Maker
    tolerance: float = 0.0
    """Relative; 0 where the stored numbers define every bit of the weight, once it has the type of the library's."""


# GPTQ and AWQ


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    sym: bool = True,
    version: int = 1,
    act_order: bool = False,
    **more: Any,
) -> Way:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        **more,
    }

    def make(weight: Tensor) -> Made:
        size = weight.shape[1] if group == -1 else group
        g_idx = np.arange(weight.shape[1]) // size
        if act_order:  # the order of the inputs is the model's, the same for all maps of the same inputs
            g_idx = np.random.default_rng(weight.shape[1]).permutation(g_idx)
        q, scale, zero = _rounded(weight, g_idx, bits, sym)
        stored = zero - 1 if version == 1 else zero
        tensors = {
            "qweight": _packed(q, bits, 0),
            "qzeros": _packed(stored, bits, 1),
            "scales": scale,
            "g_idx": g_idx.astype(np.int32),
        }
        return Made(_torch(tensors), torch.from_numpy(((q - zero[g_idx]) * scale[g_idx]).T.copy()))

    return Way(config, make)


def awq(group: int = 32, **more: Any) -> Way:
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        **more,
    }

    def make(weight: Tensor) -> Made:
        size = weight.shape[1] if group == -1 else group
        groups = np.arange(weight.shape[1]) // size
        q, scale, zero = _rounded(weight, groups, 4, sym=False)
        order = np.arange(weight.shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        tensors = {
            "qweight": _packed(q[:, order], 4, 1),
            "qzeros": _packed(zero[:, order], 4, 1),
            "scales": scale,
        }
        return Made(_torch(tensors), torch.from_numpy(((q - zero[groups]) * scale[groups]).T.copy()))

    return Way(config, make)


def _rounded(weight: Tensor, groups: Any, bits: int, sym: bool) -> tuple[Any, Any, Any]:
    """Integers [in, out], scales [groups, out] in float16 and zero points [groups, out] of the group of each input."""
    w, most = weight.float().numpy().T, 2**bits - 1
    scale, zero = [], []
    for group in range(groups.max() + 1):
        low, high = (
            np.minimum(w[groups == group].min(0), -1e-3),
            np.maximum(w[groups == group].max(0), 1e-3),
        )
        if sym:
            high = np.maximum(-low, high)
            low = -high
        step = ((high - low) / most).astype(np.float16)
        scale.append(step)
        zero.append(np.full(step.shape, 2 ** (bits - 1)) if sym else np.clip(np.rint(-low / step), 1, most))
    s, z = np.stack(scale), np.stack(zero).astype(np.int64)
    q = np.clip(np.rint(w / s[groups]) + z[groups], 0, most).astype(np.int64)
    return q, s, z


def _packed(numbers: Any, bits: int, axis: int) -> Any:
    """Unsigned numbers side by side along an axis, in 32-bit words."""
    numbers = np.moveaxis(numbers, axis, -1)
    words = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] * bits // 32)), np.uint64)
    for i in range(numbers.shape[-1]):
        words[..., i * bits // 32] |= numbers[..., i].astype(np.uint64) << np.uint64(i * bits % 32)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def _torch(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


# compressed-tensors


def compressed(
    format: str, activations: Config | None = None, more: Config | None = None, **weights: Any
) -> Way:
    args = QuantizationArgs(**weights)
    inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    compressor = BaseCompressor.get_value_from_registry(format)
    group = json.loads(scheme.model_dump_json(exclude_none=True))
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **(more or {}),
    }

    def make(weight: Tensor) -> Made:
        scale, zero, divisor = _qparams(weight.bfloat16(), args)
        stored = {"weight": weight.bfloat16(), "weight_scale": scale, "weight_zero_point": zero}
        if divisor is not None:
            stored["weight_global_scale"] = divisor
        if inputs is not None and not inputs.dynamic:
            stored["input_scale"] = torch.tensor([0.1])
        tensors = compressor.compress(stored, scheme)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        return Made(tensors, compressor.decompress(tensors, scheme)["weight"])

    return Way(config, make)


def act_ordered(group: int = 32) -> Way:
    """pack-quantized with weight_g_idx, which later versions of the library have dropped.

    The groups are those of the inputs in another order; integers and packing are the library's.
    """
    ordered = compressed("pack-quantized", num_bits=4, strategy="group", group_size=group)
    weights = {**ordered.config["config_groups"]["group_0"]["weights"], "actorder": "group"}
    config = {**ordered.config, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}

    def make(weight: Tensor) -> Made:
        columns = weight.shape[1]
        order = torch.from_numpy(np.random.default_rng(columns).permutation(columns))
        made, back = ordered.make(weight[:, order]), torch.argsort(order)
        integers = unpack_from_int32(made.tensors["weight_packed"], 4, weight.shape)
        tensors = {
            "weight_packed": pack_to_int32(integers[:, back], 4),
            "weight_g_idx": (back // group).int(),
        }
        return Made(made.tensors | tensors, made.weight[:, back])

    return Way(config, make)


def _qparams(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scale, zero point, and for NVFP4 the scale of scales, by the library; zero points as it has them in memory."""
    rows, columns = weight.shape
    match str(getattr(args.strategy, "value", args.strategy)):
        case "tensor":
            blocks = weight.reshape(1, -1)
        case "channel":
            blocks = weight.unsqueeze(1)
        case "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
            tiles = torch.unflatten(torch.unflatten(padded, 0, (-1, high)), 2, (-1, wide))
            blocks = tiles.transpose(1, 2).flatten(2)
        case _:
            blocks = torch.unflatten(weight, 1, (-1, args.group_size))
    low, high = blocks.amin(-1), blocks.amax(-1)
    divisor = None
    if args.num_bits == 4 and args.group_size == 16 and args.type == "float":
        divisor = generate_gparam(weight.min(), weight.max()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=divisor)
    return scale, zero, divisor


# FP8


def fp8(block: bool, **more: Any) -> Way:
    config: Config = {"quant_method": "fp8", "activation_scheme": "dynamic", **more}
    if block:
        config["weight_block_size"] = [128, 128]

    def make(weight: Tensor) -> Made:
        out, columns = weight.shape
        size = (128, 128) if block else (out, columns)
        rows, cells = (-(-out // size[0]), -(-columns // size[1]))
        scale = torch.rand(rows, cells) * 0.01 + 0.001
        spread = scale.repeat_interleave(size[0], 0)[:out].repeat_interleave(size[1], 1)[:, :columns]
        numbers = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scale if block else scale.reshape(())
        suffix = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
        return Made(
            {"weight": numbers, suffix: stored, "input_scale": torch.ones(1)}, numbers.float() * spread
        )

    return Way(config, make)


# modelopt


def modelopt(algorithm: str, **more: Any) -> Way:
    """NVFP4 is packed by compressed-tensors, whose global scale divides; modelopt has the reciprocal."""
    config: Config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}
    own = NVFP4 if algorithm == "NVFP4" else fp8(block=False)

    def make(weight: Tensor) -> Made:
        made = own.make(weight)
        if algorithm == "FP8":
            return made
        packed, scale = made.tensors["weight_packed"], made.tensors["weight_scale"]
        second = 1 / made.tensors["weight_global_scale"].float().reshape(())
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": second}
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        numbers = torch.tensor(E2M1)[codes.int()]
        spread = (scale.float() * second).repeat_interleave(16, 1)
        return Made(tensors | {"input_scale": torch.ones(())}, numbers * spread)

    return Way(config, make)


# bitsandbytes, whose import takes seconds


def bnb4(kind: str, nested: bool = False, storage: torch.dtype = torch.uint8, **more: Any) -> Way:
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
        "llm_int8_skip_modules": None,
        **more,
    }

    def make(weight: Tensor) -> Made:
        import bitsandbytes.functional as bnb

        packed, state = bnb.quantize_4bit(
            weight.float().contiguous(), quant_type=kind, compress_statistics=nested, quant_storage=storage
        )
        tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        state.shape = torch.Size(
            (weight.numel(),)
        )  # with 2 axes, the CPU's kernel misreads blocks across rows
        return Made({"weight": packed, **tensors}, bnb.dequantize_4bit(packed, state).view(weight.shape))

    return Way(config, make)


def bnb8() -> Way:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}

    def make(weight: Tensor) -> Made:
        import bitsandbytes.functional as bnb

        numbers, scale, _ = bnb.int8_vectorwise_quant(weight.half())
        tensors = {"weight": numbers, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return Made(tensors, bnb.int8_vectorwise_dequant(numbers, scale))

    return Way(config, make, tolerance=3e-7)


# torchao


def torchao(config: Any, dtype: torch.dtype = torch.bfloat16) -> Way:
    def make(weight: Tensor) -> Made:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.to(dtype))
        ao.quantize_(linear, config)
        return _flattened(linear.weight.data, linear.weight.dequantize())

    return Way(_torchao_config(config), make)


def torchao_int4(group: int = 32) -> Way:
    """Int4Tensor, which torchao makes with kernels of a GPU only: numbers from -8 to 7, and zero = low + 8 * scale."""

    def make(weight: Tensor) -> Made:
        groups = torch.unflatten(weight.float(), 1, (-1, group))
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).bfloat16()
        zero = (low + 8 * scale.float()).bfloat16()
        q = ((groups - low.unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp(0, 15).flatten(
            1
        ).int() - 8
        packed = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)).to(torch.int8)
        stored = Int4Tensor(packed, scale.T.contiguous(), zero.T.contiguous(), [1, group], weight.shape)
        spread = [x.float().repeat_interleave(group, 1) for x in (scale, zero)]
        return _flattened(stored, q * spread[0] + spread[1])

    return Way(_torchao_config(ao.Int4WeightOnlyConfig(group_size=group)), make, tolerance=1e-6)


def _flattened(tensor: Tensor, weight: Tensor) -> Made:
    tensors, _ = flatten_tensor_state_dict({"x.weight": tensor})
    return Made({name.removeprefix("x."): value for name, value in tensors.items()}, weight.detach())


def _torchao_config(config: Any) -> Config:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": json.loads(json.dumps(config_to_dict(config)))},
    }


_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_FP8_TOKEN = {**_TOKEN, "type": "float"}
_FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_FP4: Config = {"num_bits": 4, "type": "float"}

E2M1 = [sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""The floats of 4 bits in the order of their bits."""

NVFP4 = compressed(
    "nvfp4-pack-quantized",
    **_FP4,
    strategy="tensor_group",
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
)

WAYS: dict[str, Way] = {
    "gptq": gptq(),
    "gptq-8": gptq(8),
    "gptq-row": gptq(4, -1),
    "gptq-8-row": gptq(8, -1),
    "gptq-asym": gptq(sym=False),
    "gptq-8-asym": gptq(8, 16, sym=False),
    "gptq-v2": gptq(version=2),
    "gptq-v2-asym": gptq(version=2, sym=False),
    "gptq-act-order": gptq(act_order=True),
    "gptq-8-act-order-asym": gptq(8, 16, sym=False, act_order=True, version=2),
    "awq": awq(),
    "awq-row": awq(-1),
    "ct-w4a16": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-w4a16-asym": compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "ct-w4a16-channel": compressed("pack-quantized", num_bits=4, strategy="channel"),
    "ct-w4a16-act-order": act_ordered(),
    "ct-w8a16": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "ct-w8a16-asym": compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
    "ct-w8a8": compressed("int-quantized", _TOKEN, num_bits=8, strategy="channel"),
    "ct-w8a8-group": compressed("int-quantized", _TOKEN, num_bits=8, strategy="group", group_size=32),
    "ct-w8a8-asym": compressed("int-quantized", _TOKEN, num_bits=8, strategy="channel", symmetric=False),
    "ct-w8a8-group-asym": compressed(
        "int-quantized", _TOKEN, num_bits=8, strategy="group", group_size=16, symmetric=False
    ),
    "ct-w4a16-tensor-asym": compressed("pack-quantized", num_bits=4, strategy="tensor", symmetric=False),
    "ct-w8a8-tensor": compressed("naive-quantized", num_bits=8, strategy="tensor"),
    "ct-w4a8": compressed("int-quantized", _TOKEN, num_bits=4, strategy="group", group_size=32),
    "ct-fp8-tensor": compressed("float-quantized", _FP8_STATIC, num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-channel": compressed("float-quantized", _FP8_TOKEN, num_bits=8, type="float", strategy="channel"),
    "ct-fp8-block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "ct-nvfp4": NVFP4,
    "ct-mxfp4": compressed(
        "mxfp4-pack-quantized", **_FP4, strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "ct-mxfp8": compressed(
        "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "fp8-block": fp8(block=True),
    "fp8-tensor": fp8(block=False),
    "fp8-tensor-inv": fp8(block=False, weight_block_size=None),
    "bnb-nf4": bnb4("nf4"),
    "bnb-nf4-nested": bnb4("nf4", nested=True),
    "bnb-fp4": bnb4("fp4"),
    "bnb-fp4-nested-bf16": bnb4("fp4", nested=True, storage=torch.bfloat16),
    "bnb-int8": bnb8(),
    "ao-int8": torchao(ao.Int8WeightOnlyConfig()),
    "ao-int8-group": torchao(ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32))),
    "ao-int8-tensor": torchao(ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())),
    "ao-intx4": torchao(ao.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=ao.PerGroup(32))),
    "ao-intx4-asym": torchao(
        ao.IntxWeightOnlyConfig(
            weight_dtype=INT4, granularity=ao.PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC
        )
    ),
    "ao-8da4w": torchao(
        ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=INT4, weight_granularity=ao.PerGroup(32))
    ),
    "ao-int4": torchao_int4(),
    "ao-fp8": torchao(ao.Float8WeightOnlyConfig()),
    "mo-fp8": modelopt("FP8"),
    "mo-nvfp4": modelopt("NVFP4"),
}
"""All ways that are read, by a name for the test."""
