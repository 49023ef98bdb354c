"""Channels that stand out, as real models have them: they must not cost the others their precision, in any format.

The model has a few channels whose activations are 50 times the others', and whose weights are so much smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.kernels import linear as kernels
from penstock.engine.kernels.linear import IntegerLinear, quantize_rows
from penstock.engine.quant import quantization
from penstock.engine.quant.integers import Inputs, Integers
from tests.engine.checkpoints import make_checkpoint
from tests.engine.gguf_files import same, write_gguf
from tests.engine.quant.storages.checkpoints import change, store
from tests.engine.quant.storages.makers import WAYS
from tests.engine.quant.storages.test_checkpoints import load, logits

TIMES, CHANNELS = 50, [7, 9, 20]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
TOKENS = torch.arange(40) * 7


def with_outliers(name: str, weight: Tensor) -> Tensor:
    """A weight of the model, whose norms are 50 times as large in those channels, as the rows of ups are."""
    weight = weight.clone()
    if name.endswith("norm.weight") and "layers" in name:
        weight[CHANNELS] *= TIMES
    if any(reader in name for reader in READERS) or "down_proj" in name:
        weight[:, CHANNELS] /= TIMES
    if "up_proj" in name:
        weight[CHANNELS] *= TIMES
    return weight


def dense(folder: Path) -> Path:
    made = make_checkpoint("llama", folder, num_hidden_layers=2, **SIZES)
    tensors = load_file(made / "model.safetensors")
    save_file(
        {name: with_outliers(name, tensor) for name, tensor in tensors.items()}, made / "model.safetensors"
    )
    return made


def stored(label: str, folder: Path) -> Path:
    """The model with the linear maps of its layers stored in one of WAYS."""

    def maker_of(name: str) -> Callable[[Tensor], object]:
        return lambda weight: WAYS[label].make(with_outliers(f"{name}.weight", weight))

    quantized, _ = store(folder, WAYS[label].config, maker_of, **SIZES)  # type: ignore[arg-type]

    def raise_norms(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: with_outliers(name, tensor) for name, tensor in tensors.items() if "norm" in name}

    change(quantized, raise_norms)
    return quantized


def gguf(type: str, folder: Path) -> Path:
    return write_gguf(dense(folder), folder / "model.gguf", same(type))


def exactly(self: IntegerLinear, x: Tensor) -> Tensor:
    """The product of inputs that are not rounded."""
    return F.linear(x, self._format.unpack(self._tensors), self._bias)


def by_rows(x: Tensor, format: Integers) -> list[tuple[Tensor, Tensor]]:
    """One scale for all inputs of a row, whatever the weights have."""
    integers, scale = quantize_rows(x)
    groups = 1 if format.inputs is Inputs.ROW else x.shape[-1] // format.group_size
    return [(integers, scale.expand(*x.shape[:-1], groups))]


EVERY_WAY: dict[str, tuple[Callable[[Path], Path], str | None, float]] = {
    "int8": (dense, "int8", 0.3),
    "int4": (dense, "int4", 0.22),
    **{type: (partial(gguf, type), None, 0.45) for type in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    **{
        label: (partial(stored, label), None, 0.01)
        for label in (
            "gptq",
            "gptq-8-act-order-asym",
            "awq",
            "ct-w4a16-asym",
            "ct-w8a16",
            "bnb-int8",
            "ao-int4",
        )
    },
}
"""How a model comes about, what it is quantized to as it is loaded, and how far its logits may be off: by less than if
inputs had one scale a row, and were not rotated."""


@pytest.mark.parametrize("way", EVERY_WAY)
def test_channels_that_stand_out_do_not_cost_the_others_their_precision(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, quantize, bound = EVERY_WAY[way]
    path = make(tmp_path)
    native, plain = (load(path, block_size, quantize) for block_size in (16, 32))
    assert (native.kernels.name, plain.kernels.name) == ("native", "torch")
    found = logits(native, TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(IntegerLinear, "__call__", exactly)
        wanted = logits(plain, TOKENS)
    monkeypatch.setattr(kernels, "round_inputs", by_rows)
    monkeypatch.setattr(quantization, "block_size", lambda _: 0)
    coarse = logits(load(path, 32, quantize), TOKENS)
    assert distance(found, wanted) < bound < distance(coarse, wanted)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
