"""Quantized checkpoints, read back by transformers and by Penstock."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model import quantizing
from penstock.engine.model.layerwise import LayerTensors
from penstock.engine.model.parse import read_config
from penstock.engine.model.quantizing import Scheme, check, layer_bytes, quantize
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import make_recipe
from penstock.engine.model.texts import Outcome, Text, Texts
from penstock.engine.model.weights import load_weights
from penstock.engine.program.parameters import AttentionWeights
from penstock.engine.quant.formats import Format, NamedTensors
from tests.engine.checkpoints import FAMILIES, make_checkpoint

CPU = torch.device("cpu")


def texts(num_calibration: int = 12, length: int = 48) -> Texts:
    generator = torch.Generator().manual_seed(1)

    def piece() -> Text:
        return Text(torch.randint(6, 500, (length,), generator=generator).tolist())

    counted = Text(piece().token_ids, [i % 3 == 0 for i in range(length)])
    return Texts([piece() for _ in range(num_calibration)], [piece(), counted])


def made(folder: Path, out: Path, scheme: Scheme, given: Texts | None = None) -> Outcome:
    """Writes a whole checkpoint."""
    out.mkdir()
    outcome = quantize(folder, out / "model.safetensors", scheme, given or texts(), CPU)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = scheme.config(config["num_hidden_layers"])
    (out / "config.json").write_text(json.dumps(config))
    copyfile(folder / "generation_config.json", out / "generation_config.json")
    return outcome


def perplexity(folder: Path, pieces: Texts, **options: Any) -> float:
    """As transformers computes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    total, count = 0.0, 0
    for piece in pieces.held_out:
        ids = torch.tensor([piece.token_ids])
        with torch.no_grad():
            likelihoods = model(ids).logits[0].log_softmax(-1)
        for place in range(1, len(piece.token_ids)):
            if piece.counted is None or piece.counted[place]:
                total -= float(likelihoods[place - 1, piece.token_ids[place]])
                count += 1
    return math.exp(total / count)


@pytest.mark.parametrize("method", quantizing.METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_was_meant(family: str, method: str, tmp_path: Path) -> None:
    """Its perplexities are those that were told, with the float weights and with the quantized ones."""
    folder = make_checkpoint(family, tmp_path / "float", dtype="bfloat16")
    outcome = made(folder, tmp_path / "made", Scheme(method=method, group_size=16))
    assert outcome.before == pytest.approx(perplexity(folder, texts()), rel=1e-3)
    found = perplexity(tmp_path / "made", texts())
    assert outcome.after == pytest.approx(found, rel=1e-2)
    assert abs(found / perplexity(folder, texts()) - 1) > 1e-3


def test_transformers_reads_dequantized_what_has_one_group(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "float")
    outcome = made(folder, tmp_path / "made", Scheme(method="gptq", group_size=16, num_wide_layers=0))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "made")
    config.quantization_config["dequantize"] = True
    assert outcome.after == pytest.approx(perplexity(tmp_path / "made", texts(), config=config), rel=1e-3)


def _unpacked(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
    """A packer of linear maps that leaves their weights to be looked at."""
    return DenseLinear(format.unpack(tensors), bias)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_penstock_reads_what_was_meant(bits: int, symmetric: bool, tmp_path: Path) -> None:
    """The weights are those that the calibrated layers ran with."""
    folder = make_checkpoint("qwen2", tmp_path / "float", dtype="float16")
    scheme = Scheme(method="rtn", bits=bits, group_size=16, symmetric=symmetric)
    made(folder, tmp_path / "made", scheme)
    config, files = read_config(tmp_path / "made"), TensorFiles(tmp_path / "made")
    unpacking = replace(reference_kernels(CPU, torch.float32), linear=_unpacked)
    recipe = make_recipe(config, LoadOptions(device="cpu"))
    weights = load_weights(config, files, unpacking, lambda *_: None, recipe)
    for index, found in enumerate(weights.layers):
        layer = LayerTensors(read_config(folder), index, TensorFiles(folder), CPU)
        expected = torch.cat(
            [
                scheme.rounding(
                    layer.weight(part.name), torch.empty(0), scheme.grid(index, torch.float16)
                ).weight()
                for part in layer.specs["qkv"].parts
            ]
        )
        assert isinstance(found.mixer, AttentionWeights)
        assert isinstance(found.mixer.qkv, DenseLinear)
        torch.testing.assert_close(found.mixer.qkv.weight, expected, rtol=1e-5, atol=1e-5)


def test_calibration_pays(tmp_path: Path) -> None:
    """A layer's outputs on the calibration texts are nearer with GPTQ than by rounding to nearest."""
    folder = make_checkpoint("llama", tmp_path / "float", dtype="float32")
    given = texts(60)
    given = Texts(given.calibration, given.calibration)
    distances = {}
    for method in ("rtn", "gptq"):
        outcome = made(folder, tmp_path / method, Scheme(method=method, group_size=16), given)
        assert outcome.before is not None
        assert outcome.after is not None
        distances[method] = abs(math.log(outcome.after / outcome.before))
    assert distances["gptq"] < distances["rtn"]


def test_one_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[LayerTensors] = weakref.WeakSet()
    most = []

    class Watched(LayerTensors):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr(quantizing, "LayerTensors", Watched)
    folder = make_checkpoint("llama", tmp_path / "float")
    told: list[float] = []
    quantize(folder, tmp_path / "out", Scheme(method="awq", group_size=16), texts(), CPU, told.append)
    assert most == [1, 1, 1]
    assert told == sorted(told)
    assert told[-1] == 1


def test_without_texts_nothing_is_measured(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "float")
    assert made(
        folder, tmp_path / "made", Scheme(method="rtn", group_size=16), Texts(texts().calibration)
    ) == Outcome(None, None)


def test_sizes(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path))
    hidden, inner, kv = 64, 112, 32
    weights = hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * inner
    assert layer_bytes(config) == 4 * (weights + 3 * hidden**2 + inner**2)
    between = 2 * hidden + 2 * kv
    assert texts().num_bytes(config) == 4 * 48 * (12 * (between + 3 * (hidden + kv)) + 2 * between)


def test_a_checkpoint_that_is_quantized_already(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "float")
    made(folder, tmp_path / "made", Scheme(method="rtn", group_size=16))
    with pytest.raises(CheckpointError, match="is quantized already, quant_method compressed-tensors"):
        check(tmp_path / "made", Scheme(method="rtn"))


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with pytest.raises(
        CheckpointError, match=r"groups of 64 do not divide the 112 inputs of .*0\.mlp\.down_proj"
    ):
        check(folder, Scheme(method="rtn", group_size=64))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_inputs_that_are_not_finite(method: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "float")
    path = folder / "model.safetensors"
    entry = TensorFiles(folder).entries["model.layers.1.input_layernorm.weight"]
    data = bytearray(path.read_bytes())
    data[entry.start : entry.start + 4] = torch.tensor(torch.nan).numpy().tobytes()
    path.write_bytes(data)
    assert entry.dtype == "F32"
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.self_attn\.q_proj inputs that are not finite"
    ):
        quantize(folder, tmp_path / "out", Scheme(method=method, group_size=16), texts(), CPU)
