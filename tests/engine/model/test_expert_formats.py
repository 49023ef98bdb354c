"""Experts in every format that linear maps have: what is loaded of them, in both forms on disk, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.kernels.experts import ListedExperts
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model import quantize_cache
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.quantize_cache import Checkpoint
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import Recipe, linear_specs, make_recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.parameters import ExpertsWeights
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.quantization import Quantization
from penstock.engine.spec import Experts, Stack
from tests.engine.families import SPARSE
from tests.engine.model.test_experts import (
    OPTIONS,
    TOKEN_IDS,
    experts_of,
    in_chunks,
    stacked,
)
from tests.engine.model.test_transformer import oracle_logits
from tests.engine.quant.storages.makers import WAYS, Way
from tests.engine.rounding_noise import largest

FAMILY = SPARSE["Qwen 3 MoE"]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "mlp_only_layers": [1],
}
EACH_STORAGE = (
    "gptq",
    "gptq-8-act-order-asym",
    "awq",
    "ct-w4a16-asym",
    "ct-w8a8",
    "ct-fp8-channel",
    "ct-fp8-block",
    "ct-nvfp4",
    "mo-nvfp4",
    "ct-mxfp4",
    "fp8-block",
    "bnb-nf4-nested",
    "bnb-int8",
    "ao-int8",
    "ao-int4",
)
STACKS = (
    Stack("mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), is_interleaved=True, is_transposed=True),
    Stack("mlp.experts.down_proj", ("down_proj",), is_transposed=True),
)
"""Those of gpt-oss."""


def load(folder: Path, **changes: Any) -> LoadedModel:
    return load_model(folder, replace(OPTIONS, **changes), lambda _: None, lambda *_: None)


def unpacking(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
    return DenseLinear(format.unpack(tensors).float(), bias)


def loaded(folder: Path, config: ModelConfig | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What the linear maps of experts stand for, and their biases; with the router of each layer before them."""
    config = config or read_config(folder)
    files = unstacked(open_files(folder), config)
    return weights_of(Checkpoint(config, files, make_recipe(config, LoadOptions(device="cpu"), files)))


def weights_of(source: Checkpoint) -> Iterator[tuple[Tensor, Tensor | None]]:
    kernels = replace(reference_kernels(torch.device("cpu"), torch.float32), linear=unpacking)
    weights = load_weights(source.config, source.files, kernels, lambda *_: None, source.recipe)
    for layer in weights.layers:
        if isinstance(own := layer.feed_forward, ExpertsWeights):
            assert isinstance(own.gate_up, ListedExperts)
            assert isinstance(own.down, ListedExperts)
            for linear in (own.router, *own.gate_up.experts, *own.down.experts):
                assert isinstance(linear, DenseLinear)
                yield linear.weight, linear.bias


def with_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def store(folder: Path, way: Way, *, with_router: bool = False, **sizes: Any) -> tuple[Path, Path]:
    """Two checkpoints: one has its linear maps, but for the router, stored in a way, and one what they stand for."""
    dense, quantized = (FAMILY.make(folder / name, **{**SIZES, **sizes}) for name in ("dense", "quantized"))
    tensors = load_file(dense / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") or (with_router and name.endswith("mlp.gate.weight")):
            made = way.make(weight)
            stored |= {f"{module}.{suffix}": tensor.clone() for suffix, tensor in made.tensors.items()}
            tensors[name] = made.weight.float().contiguous()
        else:
            stored[name] = weight
    save_file(tensors, dense / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    with_quantization(quantized, way.config)
    return quantized, dense


def assert_same(found: Path, wanted: Path, way: Way) -> None:
    dtype = way.make(torch.randn(16, 96)).weight.dtype
    pairs = list(zip(loaded(found), loaded(wanted), strict=True))
    assert len(pairs) == 17
    for (own, _), (other, _) in pairs:
        torch.testing.assert_close(own.to(dtype), other.to(dtype), rtol=way.tolerance, atol=way.tolerance)


@pytest.mark.parametrize("label", EACH_STORAGE)
def test_experts_have_the_weights_that_are_stored(label: str, tmp_path: Path) -> None:
    """The router is in floating point, which GPTQ's and AWQ's configs do not say."""
    quantized, dense = store(tmp_path, WAYS[label])
    assert_same(quantized, dense, WAYS[label])
    if label in ("gptq", "bnb-nf4-nested"):
        found, wanted = in_chunks(load(quantized)), in_chunks(load(dense))
        assert (found - wanted).norm() / wanted.norm() < (0.2 if label == "gptq" else 1e-4)


def test_a_router_may_be_quantized_too(tmp_path: Path) -> None:
    quantized, dense = store(tmp_path, WAYS["gptq"], with_router=True)
    assert_same(quantized, dense, WAYS["gptq"])


def test_experts_keep_the_format_of_their_file(tmp_path: Path) -> None:
    quantized, _ = store(tmp_path, WAYS["gptq"])
    config = read_config(quantized)
    specs = linear_specs(config, 0, make_recipe(config, LoadOptions(device="cpu")))
    formats = {name: spec.format for name, spec in specs.items() if name.startswith("experts.")}
    assert len(formats) == 16
    assert all(isinstance(format, Integers) and format.bits == 4 for format in formats.values())
    assert specs["router"].format.name == "dense"


def stack(folder: Path, stacks: tuple[Stack, ...], ends: dict[str, str]) -> None:
    """Stacks the tensors of experts of a checkpoint, of which `ends` says what follows the name for each suffix."""
    tensors = load_file(folder / "model.safetensors")
    for suffix, end in ends.items():
        for one in stacks:
            prefix = f"model.layers.0.{one.name.rpartition('.')[0]}"
            experts = [
                [tensors.pop(f"{prefix}.{expert}.{map}.{suffix}").view(torch.uint8) for map in one.maps]
                for expert in range(8)
            ]
            whole = torch.stack([torch.cat(parts) for parts in experts])
            tensors[f"model.layers.0.{one.name}{end}"] = whole
    save_file(tensors, folder / "model.safetensors")


def test_floats_of_8_bits_are_stacked_as_transformers_does(tmp_path: Path) -> None:
    quantized, dense = store(tmp_path, WAYS["fp8-block"], hidden_size=128, moe_intermediate_size=128)
    expected = list(loaded(quantized))
    before = load_file(quantized / "model.safetensors")
    own = experts_of(read_config(dense))
    stack(quantized, (own.stacks[0], own.stacks[-1]), {"weight": "", "weight_scale_inv": "_scale_inv"})
    types = {"": torch.float8_e4m3fn, "_scale_inv": torch.float32}
    tensors = load_file(quantized / "model.safetensors")
    for name in tensors.keys() - before.keys():
        tensors[name] = tensors[name].view(types["_scale_inv" if name.endswith("_inv") else ""])
    save_file(tensors, quantized / "model.safetensors")
    for (found, _), (wanted, _) in zip(loaded(quantized), expected, strict=True):
        assert torch.equal(found, wanted)


def gpt_oss(folder: Path) -> tuple[Path, ModelConfig, dict[str, Tensor]]:
    """A checkpoint of gpt-oss as it is published, its config, and the stacked tensors of its experts."""
    folder = SPARSE["gpt-oss"].make(
        folder, num_hidden_layers=1, num_local_experts=8, intermediate_size=64, head_dim=32
    )
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if ".experts." not in n}
    generator = torch.Generator().manual_seed(1)
    own: dict[str, Tensor] = {}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        own[f"{name}_blocks"] = torch.randint(256, (8, rows, 2, 16), generator=generator).byte()
        own[f"{name}_scales"] = torch.randint(118, 126, (8, rows, 2), generator=generator).byte()
        own[f"{name}_bias"] = torch.randn(8, rows, generator=generator)
    own["down_proj_scales"][0, 0] = torch.tensor([0, 1])
    named = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in own.items()}
    save_file({**tensors, **named}, folder / "model.safetensors")
    layers = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    with_quantization(folder, {"quant_method": "mxfp4", "modules_to_not_convert": layers})
    return folder, read_config(folder), own


def test_gpt_oss_says_what_transformers_says(tmp_path: Path) -> None:
    folder, _, own = gpt_oss(tmp_path / "own")
    dense = SPARSE["gpt-oss"].make(
        tmp_path / "dense", num_hidden_layers=1, num_local_experts=8, intermediate_size=64, head_dim=32
    )
    made = {
        name: convert_moe_packed_tensors(
            own[f"{name}_blocks"], own[f"{name}_scales"], dtype=torch.float32
        ).contiguous()
        for name in ("gate_up_proj", "down_proj")
    }
    made |= {name: tensor for name, tensor in own.items() if name.endswith("bias")}
    file = dense / "model.safetensors"
    named = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in made.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})
    expected = oracle_logits(dense, TOKEN_IDS)
    assert largest(in_chunks(load(dense)) - expected) <= 1e-4 * largest(expected)
    found = in_chunks(load(folder))
    assert float((found - expected).norm() / expected.norm()) < 0.02, (
        "numbers between linear maps have 8 bits"
    )


def test_the_experts_of_gpt_oss_are_those_of_transformers(tmp_path: Path) -> None:
    folder, config, own = gpt_oss(tmp_path)
    found = list(loaded(folder, config))[1:]
    for name, experts in (("gate_up_proj", found[:8]), ("down_proj", found[8:])):
        blocks, scales = own[f"{name}_blocks"], own[f"{name}_scales"]
        weights = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
        for number, (weight, bias) in enumerate(experts):
            is_fused = name == "gate_up_proj"
            order = (
                torch.arange(len(weight)).view(-1, 2).T.flatten() if is_fused else torch.arange(len(weight))
            )
            assert torch.equal(weight, weights[number][order])
            assert bias is not None
            assert torch.equal(bias, own[f"{name}_bias"][number][order])


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    folder, config, _ = gpt_oss(tmp_path)
    files, done = unstacked(open_files(folder), config), []
    recipe = make_recipe(config, LoadOptions(device="cpu"), files)
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    load_weights(config, files, kernels, lambda so_far, total: done.append((so_far, total)), recipe)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert done[-1] == (size, size)


def test_experts_of_4_bits_keep_4_bits(tmp_path: Path) -> None:
    folder, config, own = gpt_oss(tmp_path)
    specs = linear_specs(config, 0, make_recipe(config, LoadOptions(device="cpu"), open_files(folder)))
    sizes = (
        specs[f"experts.3.{field}"].format.num_bytes(rows, 64, torch.bfloat16)
        for field, rows in (("gate_up", 128), ("down", 64))
    )
    stored = sum(
        own[f"{name}_{end}"][3].nbytes for name in ("gate_up_proj", "down_proj") for end in ("blocks",)
    )
    assert sum(sizes) == stored * 9 // 8, "and two bytes for each scale of one"


def refused(folder: Path, config: ModelConfig, name: str, made: Tensor | None) -> str:
    """What is said of a checkpoint of which a tensor is missing or another one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file({**tensors, **({} if made is None else {name: made})}, file)
    with pytest.raises(CheckpointError) as caught:
        list(loaded(folder, config))
    return str(caught.value)


def test_what_is_wrong_with_experts_in_4_bits_is_named(tmp_path: Path) -> None:
    folder, config, own = gpt_oss(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = own["down_proj_scales"].clone()
    scales[5, 3] = 255
    assert refused(folder, config, name, scales).endswith(
        f"{name} of expert 5 has values that are not finite"
    )
    said = refused(folder, config, name, scales[:, :, :1].contiguous())
    assert f"{name} of expert 0 has shape [64, 1], and config.json says [64, 2]" in said
    assert f"{name} of expert 0 is F32, which is not supported; only U8 are" in refused(
        folder, config, name, scales.float()
    )
    assert "8 experts of 1 map each" in refused(folder, config, name, scales[:7])
    missing = "model.layers.0.mlp.experts.0.down_proj"
    assert f"tensor {missing}.scales is missing; {missing}.blocks is there" in refused(
        folder, config, name, None
    )


def test_experts_of_one_layer_have_one_format(tmp_path: Path) -> None:
    quantized, dense = store(tmp_path, WAYS["ct-w8a8"])
    name = "model.layers.0.mlp.experts.3.up_proj"
    tensors = load_file(quantized / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{name}.")}
    tensors[f"{name}.weight"] = load_file(dense / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, quantized / "model.safetensors")
    with_quantization(quantized, {**WAYS["ct-w8a8"].config, "ignore": ["lm_head", name]})
    said = "mlp.experts.3.gate_proj is stored otherwise than model.layers.0.mlp.experts.0.gate_proj"
    with pytest.raises(CheckpointError, match=said):
        load(quantized)


# What --quantize makes of them


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nf4"])
def test_experts_that_are_quantized_here_are_kept_for_the_next_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked on disk as gpt-oss has them in floating point. The router is not quantized."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(quantize_cache, "SMALLEST", 0)
    exact = FAMILY.make(tmp_path / "model", **{**SIZES, "num_hidden_layers": 3})
    config = read_config(exact)
    layers = tuple(
        layer.with_feed_forward(stacks=STACKS) if isinstance(layer.feed_forward, Experts) else layer
        for layer in config.layers
    )
    config = replace(config, spec=replace(config.spec, layers=layers))
    one_by_one = {number: weight for number, (weight, _) in enumerate(loaded(exact))}
    source = Checkpoint(
        config,
        unstacked(open_files(stacked(exact, *STACKS)), config),
        Recipe(quantization=Quantization(name)),
    )
    at_load = list(weights_of(source))
    said: list[str] = []
    for _ in range(2):
        kept = list(weights_of(quantize_cache.quantized(source, said.append, lambda *_: None)))
        assert all(torch.equal(found, wanted) for (found, _), (wanted, _) in zip(kept, at_load, strict=True))
    assert "by an earlier start" in said[-1]
    largest = {"int8": 0.01, "int4": 0.1, "fp8": 0.04, "nf4": 0.12}[name]
    assert len(at_load) == 34
    for number, (weight, _) in enumerate(at_load):
        error = float((weight - one_by_one[number]).norm() / one_by_one[number].norm())
        assert error == 0 if number % 17 == 0 else 0 < error < largest
