"""The checkpoints of random weights with experts are whole, and are read as they were meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lab.bench import sparse_files
from lab.bench.sparse_files import A3B_30B, SparseShape, write_sparse
from penstock.engine.config import LoadOptions
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.engine.model.files import open_files
from penstock.engine.model.tensors import check_tensors, layer_specs, make_recipe
from penstock.engine.quant.integers import Integers

TINY = SparseShape("tiny", 128, 2, 2, 1, 64, 4, 2, 128, 512)


def test_a_checkpoint_has_what_its_config_says(tmp_path: Path) -> None:
    folder = write_sparse(TINY, tmp_path)
    config, files = read_config(folder), open_files(folder)
    recipe = make_recipe(config, LoadOptions(device="cpu"), files)
    check_tensors(config, files, recipe)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert files.read("model.layers.1.mlp.experts.3.down_proj.weight_shape").tolist() == [128, 128]
    formats = [spec.format for spec in layer_specs(config, recipe)]
    assert sum(isinstance(format, Integers) and format.bits == 4 for format in formats) == 2 * (2 + 2 * 4)
    assert read_tokenizer(folder).encode("a b")


def test_the_large_one_is_of_17_gigabytes() -> None:
    layer = sum(
        torch.Size(stored.size).numel() * stored.dtype.itemsize
        for _, stored in sparse_files._layer(A3B_30B, 0)
    )
    outside = 2 * A3B_30B.vocabulary * A3B_30B.hidden * 2
    assert 16e9 < A3B_30B.num_layers * layer + outside < 17.5e9


def test_the_command_cuts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_files, "A3B_30B", TINY)
    monkeypatch.setattr(sys, "argv", ["sparse_files", str(tmp_path), "--layers", "1"])
    sparse_files.main()
    assert read_config(tmp_path).num_layers == 1
