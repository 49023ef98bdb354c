"""Files that are written tensor by tensor, read by the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from penstock.engine.model.tensor_writer import TensorWriter

TENSORS = {
    "half": torch.randn(3, 5).half(),
    "b": torch.randn(7).bfloat16(),
    "words": torch.randint(-(1 << 31), 1 << 31, (4, 3)).int(),
    "shape": torch.tensor([3, 5]),
    "none": torch.empty(0, 4),
    "bytes": torch.tensor([1, 2, 255], dtype=torch.uint8),
}
ANNOUNCED = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


def test_the_library_reads_them_whatever_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with TensorWriter(path, ANNOUNCED) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            found = opened.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_strided_tensors_are_written_as_they_read(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    with TensorWriter(tmp_path / "a", {"x": ((4, 3), torch.float32)}) as writer:
        writer.write("x", tensor)
    with safe_open(tmp_path / "a", "pt") as opened:
        assert torch.equal(opened.get_tensor("x"), tensor)


def test_what_was_announced_must_come(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="never written: \\['b'"),
        TensorWriter(tmp_path / "a", ANNOUNCED) as writer,
    ):
        writer.write("half", TENSORS["half"])


@pytest.mark.parametrize("wrong", [torch.zeros(8).bfloat16(), torch.zeros(7)], ids=["shape", "type"])
def test_what_comes_must_be_as_announced(wrong: torch.Tensor, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="b was announced otherwise"),
        TensorWriter(tmp_path / "a", ANNOUNCED) as writer,
    ):
        writer.write("b", wrong)
