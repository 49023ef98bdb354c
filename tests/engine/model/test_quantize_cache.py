"""The cache of `--quantize` has what would be made again, and trouble with it is a line and nothing worse."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.kernels.linear import DenseLinear, IntegerLinear, Linear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model import quantize_cache
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf.config import read_config as gguf_config
from penstock.engine.model.parse import read_config
from penstock.engine.model.quantize_cache import Checkpoint, quantized
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import Recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.parameters import MlpWeights, Weights
from penstock.engine.quant import integers
from penstock.engine.quant.codebook import Codebook
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.quantization import Quantization
from penstock.engine.quant.storage import Plain
from tests.engine.checkpoints import FAMILIES, make_checkpoint
from tests.engine.gguf_files import same, write_gguf

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is kept; the smallest of models is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(quantize_cache, "SMALLEST", 0)
    return tmp_path / "cache" / "penstock" / "quantized"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "model")


def make(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    return make_checkpoint(family, folder, seed=seed, intermediate_size=96, dtype="bfloat16")


def prepare(folder: Path, name: str = "int4") -> tuple[Checkpoint, list[str]]:
    """Returns the checkpoint that weights would be loaded from, and the lines of progress."""
    said: list[str] = []
    source = Checkpoint(read_config(folder), TensorFiles(folder), Recipe(quantization=Quantization(name)))
    return quantized(source, said.append, lambda *_: None), said


def load(source: Checkpoint) -> dict[str, Tensor]:
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    return dict(
        tensors_of(load_weights(source.config, source.files, kernels, lambda *_: None, source.recipe))
    )


def tensors_of(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    def linear(name: str, linear: Linear) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(linear, IntegerLinear | DenseLinear)
        tensors = linear._tensors if isinstance(linear, IntegerLinear) else {"weight": linear.weight}
        bias = linear._bias if isinstance(linear, IntegerLinear) else linear.bias
        for kind, tensor in {**tensors, **({} if bias is None else {"bias": bias})}.items():
            yield f"{name}.{kind}", tensor

    assert isinstance(weights.embedding, Tensor)
    yield "embedding", weights.embedding
    yield from linear("head", weights.lm_head)
    for i, layer in enumerate(weights.layers):
        assert isinstance(layer.feed_forward, MlpWeights)
        assert layer.input_norm is not None
        yield f"{i}.input_norm", layer.input_norm
        for name in ("gate_up", "down"):
            yield from linear(f"{i}.{name}", getattr(layer.feed_forward, name))
        for name in ("qkv", "o"):
            yield from linear(f"{i}.{name}", getattr(layer.mixer, name))


def made_at_load(folder: Path, name: str = "int4") -> dict[str, Tensor]:
    recipe = Recipe(quantization=Quantization(name))
    return load(Checkpoint(read_config(folder), TensorFiles(folder), recipe))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def never(*_: object) -> None:
    raise AssertionError("quantized once more")


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_start_reads_what_the_first_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, name: str
) -> None:
    folder = make(tmp_path / "model", family)
    wanted = made_at_load(folder, name)
    first, said = prepare(folder, name)
    assert said[0] == f"quantizing to {name}; the result is kept for the next start"
    assert said[1].startswith("quantized in ")
    assert_same(load(first), wanted)
    for format in (Integers, Float8, Codebook):
        monkeypatch.setattr(format, "quantize", never)
    second, said = prepare(folder, name)
    assert_same(load(second), wanted)
    (line,) = said
    assert line.startswith(f"weights were quantized to {name} by an earlier start: ")


def test_another_process_finds_it(folder: Path, cache: Path) -> None:
    """Where objects happen to lie in memory makes no difference."""
    for _ in range(2):
        recipe = Recipe(lambda _: Plain(), Quantization("int8"))
        quantized(
            Checkpoint(read_config(folder), TensorFiles(folder), recipe), lambda _: None, lambda *_: None
        )
    assert len(list(cache.iterdir())) == 1


def test_it_is_a_file_that_the_safetensors_library_reads(folder: Path, cache: Path) -> None:
    prepare(folder)
    (path,) = cache.iterdir()
    assert path.name.startswith("model-int4-")
    with safe_open(path, "pt") as file:
        packed = file.get_tensor("model.layers.1.mlp.down_proj.weight")
        head = file.get_tensor("lm_head.weight")
    weights = load_file(folder / "model.safetensors")
    wanted = Integers(4, 32, has_offset=True).quantize(weights["model.layers.1.mlp.down_proj.weight"])[
        "weight"
    ]
    assert torch.equal(packed & 15, wanted[:, ::2].to(torch.uint8))
    assert torch.equal(packed >> 4, wanted[:, 1::2].to(torch.uint8))
    of_head = Quantization("int4").head_format(64).quantize(weights["lm_head.weight"])
    assert torch.equal(head, of_head["weight"])


def test_a_gguf_file_is_kept_with_its_rows_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, and queries and keys, come out of it in another order than they are stored in."""
    folder = make_checkpoint(
        "llama",
        tmp_path / "model",
        intermediate_size=96,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    path = write_gguf(folder, tmp_path / "model.gguf", same("F32"))
    recipe = Recipe(quantization=Quantization("int4"))
    source = Checkpoint(gguf_config(path), open_files(path), recipe)
    wanted = load(source)
    for _ in range(2):
        assert_same(load(quantized(source, lambda _: None, lambda *_: None)), wanted)
        monkeypatch.setattr(Integers, "quantize", never)


def test_quantizing_is_told_as_it_goes_on(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    source = Checkpoint(read_config(folder), TensorFiles(folder), Recipe(quantization=Quantization("int8")))
    quantized(source, lambda _: None, lambda done, total: told.append((done, total)))
    linears = sum(t.nbytes for name, t in load_file(folder / "model.safetensors").items() if "proj" in name)
    head = 512 * 64 * 2
    assert told[-1] == (linears + head, linears + head)
    assert told == sorted(told)


# What makes a file stale


def test_another_model_of_the_same_sizes_and_dates_is_another_file(folder: Path, cache: Path) -> None:
    prepare(folder)
    before = (folder / "model.safetensors").stat()
    make(folder, seed=1)
    after = folder / "model.safetensors"
    os.utime(after, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (after.stat().st_size, after.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    found, _ = prepare(folder)
    assert_same(load(found), made_at_load(folder))
    assert len(list(cache.iterdir())) == 2


def test_a_file_that_was_touched_is_quantized_again(folder: Path, cache: Path) -> None:
    prepare(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    prepare(folder)
    assert len(list(cache.iterdir())) == 2


def test_other_code_makes_another_file(
    tmp_path: Path, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(folder)
    changed = tmp_path / "integers.py"
    changed.write_text(Path(str(integers.__file__)).read_text() + "# rounds otherwise\n")
    monkeypatch.setattr(integers, "__file__", str(changed))
    prepare(folder)
    assert len(list(cache.iterdir())) == 2


def test_every_quantization_has_a_file_of_its_own(folder: Path, cache: Path) -> None:
    ways = [Quantization(name, size) for name in ("int8", "int4", "nf4") for size in (None, 32)]
    ways.append(Quantization("fp8"))
    for quantization in ways:
        source = Checkpoint(read_config(folder), TensorFiles(folder), Recipe(quantization=quantization))
        quantized(source, lambda _: None, lambda *_: None)
    assert len(list(cache.iterdir())) == len(ways)


# Trouble


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_the_highest_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 // 8 * 8 + 7] ^= 1 << 7
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def junk(path: Path) -> None:
    path.write_bytes(b"\x10\0\0\0\0\0\0\0" + b"[" * 64)


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.layers.2.self_attn.q_proj.scale"]
    save_file(tensors, path)


def without_a_checksum(path: Path) -> None:
    tensors = load_file(path)
    del tensors["checksum"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    "damage", [truncate, flip, flip_the_highest_bit, empty, junk, without_a_tensor, without_a_checksum]
)
def test_a_damaged_file_is_told_and_made_anew(folder: Path, cache: Path, damage: object) -> None:
    prepare(folder)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    assert callable(damage)
    damage(path)
    found, said = prepare(folder)
    assert said[0].startswith(f"{path} is ignored and made anew: ")
    assert [line.partition(" ")[0] for line in said[1:]] == ["quantizing", "quantized"]
    assert_same(load(found), made_at_load(folder))
    assert path.read_bytes() == whole


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_becomes_full_is_told_and_nothing_stays_behind(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    found, said = prepare(folder)
    assert said[-1].startswith("the quantized weights are not kept for the next start: ")
    assert "No space left on device" in said[-1]
    assert_same(load(found), made_at_load(folder))
    assert list(cache.iterdir()) == []


def test_a_disk_with_little_room_is_left_alone(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    found, said = prepare(folder)
    assert found.recipe.quantization is not None
    (line,) = said
    assert "has 1024 MiB free" in line
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    found, said = prepare(folder)
    assert found.recipe.quantization is not None
    (line,) = said
    assert line.startswith("the quantized weights are not kept for the next start: ")


def test_no_home_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert prepare(folder)[1] == [
        "the quantized weights are not kept for the next start: Could not determine home directory."
    ]


# The bound


def test_what_was_not_used_for_longest_makes_room(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make(tmp_path / f"model{i}", seed=i) for i in range(4)]
    for i, folder in enumerate(folders[:3]):
        prepare(folder)
        (path,) = cache.glob(f"model{i}-*")
        os.utime(path, (i, i))
    prepare(folders[0])  # and so it was used last
    size = path.stat().st_size
    monkeypatch.setattr(quantize_cache, "MOST_BYTES", 3 * size + size // 2)
    prepare(folders[3])
    assert sorted(path.name[:6] for path in cache.iterdir()) == ["model0", "model2", "model3"]


def test_what_is_larger_than_the_bound_is_not_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_cache, "MOST_BYTES", 1000)
    (line,) = prepare(folder)[1]
    assert "at most" in line
    assert not cache.exists()


def test_what_killed_processes_left_is_removed_a_day_later(folder: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    for name, age_s in (("old.partial", 25 * 3600), ("new.partial", 3600)):
        (cache / name).touch()
        os.utime(cache / name, (time.time() - age_s,) * 2)
    prepare(folder)
    assert [path.name for path in cache.glob("*.partial")] == ["new.partial"]


def test_small_checkpoints_are_not_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_cache, "SMALLEST", 64 << 20)
    found, said = prepare(folder)
    assert found.recipe.quantization is not None
    assert said == []
    assert not cache.exists()


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"keep_quantized": True}])
def test_a_loader_keeps_only_what_it_is_asked_to(
    folder: Path, cache: Path, options: dict[str, object]
) -> None:
    wanted = {"device": "cpu", "num_blocks": 8, "block_size": 32}  # a size that plain torch serves
    load_model(folder, LoadOptions(**wanted, **options), lambda _: None, lambda *_: None)  # type: ignore[arg-type]
    assert not cache.exists()
    both = LoadOptions(**wanted, quantize="int8", keep_quantized=True)  # type: ignore[arg-type]
    load_model(folder, both, lambda _: None, lambda *_: None)
    assert len(list(cache.iterdir())) == 1
