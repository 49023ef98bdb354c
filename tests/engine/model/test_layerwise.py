"""Layers that run one at a time, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.model.layerwise import LayerTensors, LayerwiseDecoder
from penstock.engine.model.parse import read_config
from penstock.engine.model.quantizing import Scheme, check
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import LinearSpec
from penstock.engine.model.texts import Text
from tests.engine.checkpoints import FAMILIES, make_checkpoint
from tests.engine.families import TINY

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
LENGTH = 40
INPUT_NORM = "model.layers.0.input_layernorm"
SHARING = "Gemma 4 E"


def decoder_of(folder: Path) -> tuple[LayerwiseDecoder, list[LayerTensors]]:
    config, files, device = read_config(folder), TensorFiles(folder), torch.device("cpu")
    layers = [LayerTensors(config, index, files, device) for index in range(config.num_layers)]
    return LayerwiseDecoder(config, files, device), layers


def check_layers(folder: Path) -> None:
    """Compares the stream after each layer with that of transformers, for two texts of different lengths."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(6, 500, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    texts = [Text(ids[0].tolist()), Text(ids[0, :7].tolist())]
    with torch.no_grad():
        states = model.model(ids, output_hidden_states=True).hidden_states
    decoder, layers = decoder_of(folder)
    stream = decoder.start(texts)
    for number, layer in enumerate(layers):
        expected = torch.cat([states[number][0], states[number][0, :7]])
        torch.testing.assert_close(stream.hidden, expected, rtol=1e-3, atol=1e-3)
        seen: list[tuple[LinearSpec, Tensor]] = []
        stream = decoder.through(layer, stream, lambda *given: seen.append(given))  # noqa: B023
        shapes = [(spec, x.shape) for spec, x in seen]
        assert shapes == [(spec, (LENGTH + 7, spec.in_features)) for spec in layer.specs.values()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    check_layers(make_checkpoint(family, tmp_path, **overrides))


@pytest.mark.parametrize("family", [family for family in TINY if family != SHARING])
def test_a_layer_of_any_family_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    check_layers(TINY[family].make(tmp_path))


def test_layers_that_read_what_others_made_do_not_run_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantized at load only: serve it with --quantize"):
        check(TINY[SHARING].make(tmp_path), Scheme(method="rtn"))


def test_the_scale_of_an_embedding_is_rounded_to_its_type(tmp_path: Path) -> None:
    """The model that is served rounds it, too."""
    folder = make_checkpoint("llama", tmp_path, dtype="bfloat16")
    config, files = read_config(folder), TensorFiles(folder)
    scaled = replace(config, spec=replace(config.spec, embedding_scale=64.3))
    stream = LayerwiseDecoder(scaled, files, torch.device("cpu")).start([Text([7, 8])])
    rows = files.read("model.embed_tokens.weight")[[7, 8]].float()
    assert torch.equal(stream.hidden, rows * torch.tensor(64.3).bfloat16().float())
    assert not torch.equal(stream.hidden, rows * 64.3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("field", ["qkv", "o", "gate_up", "down"])
def test_scaling_the_inputs_of_a_linear_map(variant: str, field: str, tmp_path: Path) -> None:
    """The layer is what it was; with what makes the inputs divided, and no more, it is not."""
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(family, tmp_path, **{**overrides, "dtype": "bfloat16"})
    decoder, (layer, *_) = decoder_of(folder)
    generator = torch.Generator().manual_seed(2)
    stream = decoder.start([Text(list(range(6, 6 + LENGTH)))])
    stream = replace(stream, hidden=torch.randn(stream.hidden.shape, generator=generator))
    before = decoder.through(layer, stream).hidden

    spec, plain = layer.specs[field], dict(layer.tensors)
    scales = torch.rand(spec.in_features, generator=generator) + 0.5
    if (heads := layer.heads(spec)) is not None:
        assert field == "o"
        scales = scales.view(heads)[:, :1].expand(heads).flatten()
    layer.scale_inputs(spec, scales)
    after = decoder.through(layer, stream).hidden
    names = [f"{part.name}.weight" for part in spec.parts]
    for name in names:
        applied = (layer.tensors[name] / plain[name]).nan_to_num(1.0)
        torch.testing.assert_close(
            applied, scales.expand(applied.shape), rtol=0.01, atol=0
        )  # norms are rounded to bfloat16
    layer.tensors |= {name: plain[name] for name in names}
    apart = decoder.through(layer, stream).hidden
    assert (apart - before).abs().max() > 0.05
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    norm = layer.weight(INPUT_NORM)
    assert torch.equal(norm, norm.bfloat16().float())


def test_a_norm_that_is_0_stays_so(tmp_path: Path) -> None:
    _, (layer, *_) = decoder_of(make_checkpoint("llama", tmp_path))
    layer.weight(INPUT_NORM)[3] = 0
    spec = layer.specs["qkv"]
    plain = layer.weight(spec.parts[0].name)
    layer.scale_inputs(spec, torch.full((64,), 2.0))
    scaled = layer.weight(spec.parts[0].name)
    assert layer.weight(INPUT_NORM)[3] == 0
    assert torch.equal(scaled[:, 3], plain[:, 3])
    assert torch.equal(scaled[:, 4:], plain[:, 4:] * 2)
