"""The doctor describes a GPU; the card is a fake one, since the machine of the tests has none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from app import doctor
from app.doctor import Level, check_gpu
from app.settings import Settings

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


def test_a_card_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    check = check_gpu(Settings())
    assert check.level is Level.OK
    assert check.text == "A Card, 78.0 of 80.0 GiB free, compute capability 9.0, CUDA 13.0"


@pytest.mark.parametrize(
    ("played", "advice"),
    [
        ({"capability": (7, 5)}, "8.0 or newer"),
        ({"triton": False}, "pip install triton"),
        ({"free": 40 * GIB}, "--gpu-memory-utilization 0.9"),
    ],
)
def test_what_keeps_it_from_being_fast_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, played: dict[str, Any], advice: str
) -> None:
    play(monkeypatch, **played)
    check = check_gpu(Settings())
    assert check.level is Level.WARN
    assert advice in check.advice


def test_no_card_is_fine_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu(Settings()).level is Level.OK
    assert check_gpu(Settings(device="cuda")).level is Level.FAIL


def test_a_card_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "version").touch()
    check = check_gpu(Settings())
    assert check.level is Level.WARN
    assert "torch for CUDA" in check.advice
