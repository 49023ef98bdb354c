"""The doctor says what is there, and what to do about what is not."""

from __future__ import annotations

import builtins
import shutil
import socket
from pathlib import Path

import pytest

from app import doctor
from app.doctor import Check, Level
from app.settings import Settings
from tests.engine.checkpoints import make_checkpoint


def test_a_check_is_a_line() -> None:
    assert str(Check(Level.OK, "port", "8000 is free")) == "ok    port      8000 is free"
    assert str(Check(Level.FAIL, "torch", "missing", "install it")) == "fail  torch     missing; install it"


def test_the_status_is_that_of_the_worst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Check(Level.OK, "a", "x"), Check(Level.WARN, "b", "y")]
    monkeypatch.setattr(doctor, "checks", lambda _: iter(findings))
    assert doctor.run(Settings()) == 0
    findings.append(Check(Level.FAIL, "c", "z"))
    assert doctor.run(Settings()) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("fail  c")


def test_this_machine_has_what_the_tests_need(tmp_path: Path) -> None:
    settings = Settings(port=0)
    levels = {check.name: check.level for check in doctor.checks(settings)}
    assert levels["python"] == levels["torch"] == levels["processor"] == levels["port"] == Level.OK
    assert doctor.check_model(Settings(model=str(tmp_path))).level is Level.FAIL


def test_a_port_in_use_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check = doctor.check_port(Settings(port=listener.getsockname()[1]))
    assert check.level is Level.FAIL


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 100 << 20)
    assert doctor.check_memory().level is Level.WARN
    monkeypatch.setattr(doctor, "available_memory", lambda: None)
    assert doctor.check_memory().level is Level.WARN


def test_no_torch_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: object) -> object:
        if name == "torch":
            raise ImportError("libtorch.so: cannot open")
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_torch)
    check = doctor.check_torch()
    assert check.level is Level.FAIL
    assert "make serve" in check.advice


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert doctor.check_compiler().level is Level.WARN


def test_the_compiler_is_the_one_that_builds_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/true -O1")
    assert doctor.check_compiler().text == "/bin/true -O1"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "/nowhere/c++ not found" in doctor.check_compiler().text


def test_kernels_that_cannot_be_built_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels.cpu import native

    def unavailable(_: object) -> None:
        raise native.NativeUnavailable("no C++ compiler")

    monkeypatch.setattr(native, "load_library", unavailable)
    check = doctor.check_kernels()
    assert check.level is Level.WARN
    assert "no C++ compiler" in check.text


def test_a_model_of_the_hub_is_not_fetched_for_a_look() -> None:
    check = doctor.check_model(Settings(model="somebody/something"))
    assert check.level is Level.OK
    assert "hub" in check.text


def test_the_types_of_a_model_and_what_they_take() -> None:
    (check,) = doctor.check_types(Settings(device="cpu", quantize="int8", kv_dtype="int8"))
    assert check.level is Level.OK
    assert check.text == "weights int8, 4.9 MiB; KV cache int8, 1.06 KiB a token"
    (check,) = doctor.check_types(Settings(device="cpu", dtype="float16"))
    assert check.text == "weights float16, 6.8 MiB; KV cache float16, 2.00 KiB a token"


def test_types_that_cannot_be_served_fail(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)  # 112 inputs of down_proj
    (check,) = doctor.check_types(Settings(model=str(tmp_path), device="cpu", quantize="int4"))
    assert check.level is Level.FAIL
    assert "--quantize int4: groups of 32 or 64 do not divide" in check.text
    assert list(doctor.check_types(Settings(model="somebody/something"))) == []
