"""The doctor describes a GPU; the card is a fake one, since the machine of the tests has none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.app import doctor
from penstock.app.doctor import check_gpu
from penstock.app.settings import Settings

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path / "version")


def play(
    monkeypatch: pytest.MonkeyPatch,
    free: int = 78 * GIB,
    capability: tuple[int, int] = (9, 0),
    triton: bool = True,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found: Any = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (triton or None) if name == "triton" else found(name)
    )


@pytest.mark.parametrize(
    ("played", "line"),
    [
        ({}, "ok    gpu       A Card, 78.0 of 80.0 GiB free, compute capability 9.0, CUDA 13.0"),
        (
            {"free": 59 * GIB},
            "ok    gpu       A Card, 59.0 of 80.0 GiB free, compute capability 9.0, CUDA 13.0",
        ),
        (
            {"free": 59 * GIB - 1},
            "warn  gpu       A Card, 59.0 of 80.0 GiB free, compute capability 9.0, CUDA 13.0, "
            "the rest is used by others; --gpu-memory-utilization 0.75 counts that too",
        ),
        (
            {"capability": (8, 0)},
            "ok    gpu       A Card, 78.0 of 80.0 GiB free, compute capability 8.0, CUDA 13.0",
        ),
        (
            {"capability": (7, 9)},
            "warn  gpu       A Card, 78.0 of 80.0 GiB free, compute capability 7.9, CUDA 13.0; "
            "our kernels need 8.0 or newer; try --device cpu",
        ),
        (
            {"triton": False},
            "warn  gpu       A Card, 78.0 of 80.0 GiB free, compute capability 9.0, CUDA 13.0, "
            "no Triton: plain torch serves; pip install triton",
        ),
    ],
)
def test_a_card_is_told_with_what_keeps_it_from_being_fast(
    monkeypatch: pytest.MonkeyPatch, played: dict[str, Any], line: str
) -> None:
    play(monkeypatch, **played)
    assert str(check_gpu(Settings(gpu_memory_utilization=0.75))) == line


def test_no_card_is_fine_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.0")
    assert str(check_gpu(Settings())) == "ok    gpu       none, models run on the processor"
    said = "--device cuda is asked for, and torch 2.0 sees none"
    assert str(check_gpu(Settings(device="cuda"))) == f"fail  gpu       {said}"
    (tmp_path / "version").touch()
    said = "there is an NVIDIA driver, and torch 2.0 sees no card; install torch for CUDA to use the card"
    assert str(check_gpu(Settings())) == f"warn  gpu       {said}"
