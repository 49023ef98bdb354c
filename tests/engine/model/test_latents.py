"""Latent attention as checkpoints store it: quantized, on several ranks, and with latents of 8 bits in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.latents import gather_latents, rotate_and_write_latents
from penstock.engine.kernels.linear import DenseLinear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import read_config
from penstock.engine.model.quantizing import METHODS, Scheme, left_out, quantize
from penstock.engine.model.stacks import unstacked
from penstock.engine.model.tensors import linear_specs, make_recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.parameters import LatentWeights
from penstock.engine.quant.formats import DENSE
from tests.engine.families import SPARSE
from tests.engine.model.test_expert_formats import loaded, unpacking, with_quantization
from tests.engine.model.test_experts import in_chunks, load
from tests.engine.model.test_quantizing import texts
from tests.engine.quant.storages.makers import WAYS

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
"""Maps of more than one block of 128 rows, some of them cut; heads that begin within blocks."""


def store(folder: Path, label: str) -> tuple[Path, Path]:
    """Two checkpoints of DeepSeek V3: one has all its linear maps stored in a way, and one what they stand for."""
    way = WAYS[label]
    dense, quantized = (SPARSE["DeepSeek V3"].make(folder / name, **SIZES) for name in ("dense", "quantized"))
    tensors, stored = load_file(dense / "model.safetensors"), dict[str, Tensor]()
    for name, weight in list(tensors.items()):
        module, _, kind = name.rpartition(".")
        if not module.endswith(("_proj", "_with_mqa")) or kind != "weight":
            stored[name] = weight
            continue
        made = way.make(weight)
        stored |= {f"{module}.{suffix}": tensor.clone() for suffix, tensor in made.tensors.items()}
        tensors[name] = made.weight.float().contiguous()
    save_file(tensors, dense / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    with_quantization(quantized, way.config)
    return quantized, dense


def mixers(folder: Path, **options: Any) -> Iterator[dict[str, Tensor]]:
    """What the matrices of each layer's attention stand for."""
    config = read_config(folder)
    files = unstacked(open_files(folder), config)
    recipe = make_recipe(config, LoadOptions(device="cpu", **options), files)
    kernels = replace(reference_kernels(torch.device("cpu"), torch.float32), linear=unpacking)
    for layer in load_weights(config, files, kernels, lambda *_: None, recipe).layers:
        own = layer.mixer
        assert isinstance(own, LatentWeights)
        found = {"q_a": own.q_a, "q": own.q, "latent": own.latent, "o": own.o}
        weights = {name: linear.weight for name, linear in found.items() if isinstance(linear, DenseLinear)}
        assert weights.keys() == found.keys()
        assert isinstance(own.up, Tensor)
        yield {**weights, "up": own.up}


@pytest.mark.parametrize("label", WAYS)
def test_maps_have_the_weights_that_are_stored(label: str, tmp_path: Path) -> None:
    """Rows in the order of the rotation among them, and what keys and values are made with, which is unpacked."""
    way = WAYS[label]
    quantized, dense = store(tmp_path, label)
    dtype = way.make(torch.randn(16, 96)).weight.dtype
    for found, wanted in zip(mixers(quantized), mixers(dense), strict=True):
        for name, weight in found.items():
            torch.testing.assert_close(
                weight.to(dtype), wanted[name].to(dtype), rtol=way.tolerance, atol=way.tolerance, msg=name
            )


@pytest.mark.parametrize("shape", [(8, 1, 1), (8, 1), (8,)])
def test_experts_in_a_stack_share_a_scale_each(shape: tuple[int, ...], tmp_path: Path) -> None:
    """As Mistral Small 4 is published: floats of 8 bits, of which gates and ups of an expert share the scale."""
    folder = SPARSE["Mistral 4"].make(tmp_path)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    stands_for: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        stored[name] = stands_for[name] = tensor
        if ".experts." in name:
            scale = tensor.abs().amax((1, 2), keepdim=True) / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stands_for[name] = stored[name].float() * scale
            stored[f"{name}_scale_inv"] = scale.view(shape)
            stored[f"{name}_activation_scale"] = torch.ones(8)
        elif name.endswith(("_proj.weight", "_mqa.weight")):
            stored[name] = (tensor * 64).to(torch.float8_e4m3fn)
            stands_for[name] = stored[name].float() / 64
            stored[f"{name}_scale_inv"] = torch.tensor(1 / 64)
    save_file(stands_for, file, {"format": "pt"})
    expected, plain = list(loaded(folder)), list(mixers(folder))
    save_file(stored, file, {"format": "pt"})
    with_quantization(
        folder, {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    )
    for (found, _), (wanted, _) in zip(loaded(folder), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for own, other in zip(mixers(folder), plain, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in other)
    assert in_chunks(load(folder)).isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nf4"])
def test_keys_and_values_are_not_quantized_at_load(name: str, tmp_path: Path) -> None:
    folder = SPARSE["DeepSeek V3"].make(tmp_path, **SIZES)
    for found, exact in zip(mixers(folder, quantize=name), mixers(folder), strict=True):
        changed = {field for field, weight in found.items() if not torch.equal(weight, exact[field])}
        assert changed == {"q_a", "q", "latent", "o"}


@pytest.mark.parametrize("method", METHODS)
def test_keys_and_values_are_not_quantized_by_the_command(method: str, tmp_path: Path) -> None:
    folder, made = SPARSE["DeepSeek V3"].make(tmp_path / "float", **SIZES), tmp_path / "made"
    made.mkdir()
    scheme, config = Scheme(method=method, group_size=32), read_config(folder)
    quantize(folder, made / "model.safetensors", scheme, texts(), torch.device("cpu"))
    copyfile(folder / "config.json", made / "config.json")
    ignored = left_out(config, open_files(folder))
    assert "model.layers.1.self_attn.kv_b_proj" in ignored
    with_quantization(made, scheme.config(config.num_layers, ignored))
    for found, exact in zip(mixers(made), mixers(folder), strict=True):
        changed = {field for field, weight in found.items() if not torch.equal(weight, exact[field])}
        assert changed == {"q_a", "q", "latent", "o"}


def test_they_count_as_what_they_become(tmp_path: Path) -> None:
    """Half of the memory would be missing where a checkpoint has them in 8 bits."""
    config = read_config(store(tmp_path, "fp8-block")[0])
    specs = linear_specs(
        config, 0, make_recipe(config, LoadOptions(device="cpu"), open_files(tmp_path / "quantized"))
    )
    assert specs["up"].stored.name == "fp8"
    assert specs["up"].format == DENSE
    assert specs["q"].format.name == "fp8"


def wide_rows(count: int, shape: KVShape) -> Tensor:
    """Rows as large as normed latents, but for a few channels that are ten times as large, and rotated keys."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, shape.head_dim, generator=generator)
    rows[:, torch.randperm(shape.latent_size, generator=generator)[:4]] *= 10
    rows[:, shape.latent_size :] *= 5
    return rows


def read_back(rows: Tensor, shape: KVShape, dtype: torch.dtype) -> Tensor:
    """The rows from a cache of a type. The norm's weights are 1 and angles are 0: rows are scaled, and scaled back."""
    num_blocks = -(-len(rows) // shape.block_size)
    layer_kv = torch.zeros(1, num_blocks, shape.stored_elements(dtype), dtype=dtype)
    latent, key = torch.split(rows, [shape.latent_size, shape.head_dim - shape.latent_size], -1)
    scale = latent.square().mean(-1, keepdim=True).sqrt()
    positions, half = torch.arange(len(rows)), key.shape[1] // 2
    places = TokenPlaces(positions, positions, torch.ones(len(rows), half), torch.zeros(len(rows), half))
    queries, norm = torch.zeros(len(rows), 1, key.shape[1] + 8), torch.ones(shape.latent_size)
    latents = torch.cat((latent, key), -1)
    rotate_and_write_latents(queries, latents, norm, 0.0, places, layer_kv, shape)
    found = gather_latents(layer_kv[0], torch.arange(num_blocks), shape, torch.float32)[0, : len(rows)]
    return torch.cat((found[:, : shape.latent_size] * scale, found[:, shape.latent_size :]), -1)


def test_latents_of_8_bits_are_nearly_those_of_16() -> None:
    """A scale for each group of as many numbers as are rotated keeps a large channel from coarsening all others.

    A group is rounded by at most half a 127th of its largest number. Of one scale for the whole row, the error would be
    that of the largest channel everywhere.
    """
    shape = KVShape(num_kv_heads=1, head_dim=576, block_size=16, latent_size=512)
    rows = wide_rows(200, shape)
    found, rounded = (read_back(rows, shape, dtype) for dtype in (torch.int8, torch.bfloat16))
    groups, errors = (torch.unflatten(x, -1, (9, 64)) for x in (rows, (found - rows).abs()))
    most = groups.abs().amax(-1, keepdim=True) / 254
    assert (errors <= most * 1.001).all()
    error, of_bfloat16 = (float((x - rows).norm() / rows.norm()) for x in (found, rounded))
    whole = rows.abs().amax(-1, keepdim=True) / 127
    of_one_scale = float(((rows / whole).round() * whole - rows).norm() / rows.norm())
    assert of_bfloat16 < error < 6 * of_bfloat16
    assert error < 0.6 * of_one_scale


def test_attention_to_latents_of_8_bits_says_nearly_the_same(tmp_path: Path) -> None:
    """Of a model without experts, of which one for another would say more than roundings do."""
    folder = SPARSE["DeepSeek V3"].make(tmp_path, first_k_dense_replace=3)
    exact = in_chunks(load(folder))
    eight, sixteen = (
        float((in_chunks(load(folder, kv_dtype=dtype)) - exact).norm() / exact.norm())
        for dtype in ("int8", "bfloat16")
    )
    assert 0 < sixteen < eight < 6 * sixteen


def test_latents_of_4_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^--kv-dtype int4 is not served for latent attention; int8 is$"
    ):
        load(SPARSE["DeepSeek V3"].make(tmp_path), kv_dtype="int4")
