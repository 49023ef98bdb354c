"""The doctor says what is there, and what to do about what is not."""

from __future__ import annotations

import builtins
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.app import doctor
from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.doctor import Check, Severity
from penstock.app.settings import Settings
from penstock.engine.kernels.cpu import native, prebuilt
from tests.engine.checkpoints import make_checkpoint


def test_the_status_is_that_of_the_worst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Check(Severity.OK, "a", "x"), Check(Severity.WARN, "b", "y")]
    monkeypatch.setattr(doctor, "checks", lambda _: iter(findings))
    assert doctor.run(Settings()) == 0
    findings.append(Check(Severity.FAIL, "c", "z"))
    assert doctor.run(Settings()) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("fail  c")


def test_this_machine_has_what_the_tests_need() -> None:
    found = {check.name: check for check in doctor.checks(Settings(port=0))}
    assert list(found) == [
        "python", "processor", "memory", "torch", "gpu", "compiler", "kernels", "model", "types", "promises",
        "families", "port", "bench",
    ]  # fmt: skip
    assert str(found["python"]) == f"ok    python    {platform.python_version()} at {sys.executable}"
    assert str(found["torch"]) == f"ok    torch     {torch.__version__}"
    assert str(found["model"]) == f"ok    model     {DEMO_MODEL}"
    assert str(found["port"]) == "ok    port      127.0.0.1:0 is free"
    assert str(found["bench"]) == "ok    bench     transformers is there for penstock bench"


def test_the_processor_is_told_with_what_counts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "num_cores", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : fpu f16c avx2 amx_int8\n")
    assert str(doctor.check_processor()) == "ok    processor x86_64, 4 cores, avx2 f16c amx_int8"


def test_a_model_that_is_none_fails(tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path))
    said = f"--model {tmp_path}: {tmp_path} is no checkpoint, it has no config.json"
    assert str(doctor.check_model(settings)) == f"fail  model     {said}"
    assert list(doctor.check_types(settings)) == []


def test_a_port_in_use_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        check = doctor.check_port(Settings(port=listener.getsockname()[1]))
    assert check.level is Severity.FAIL


@pytest.mark.parametrize(
    ("free", "line"),
    [
        (3 << 29, "ok    memory    1.5 GiB available"),
        (1 << 30, "ok    memory    1.0 GiB available"),
        ((1 << 30) - 1, "warn  memory    1.0 GiB available; close something, or serve a small model"),
    ],
)
def test_less_than_a_gibibyte_is_little(monkeypatch: pytest.MonkeyPatch, free: int, line: str) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: free)
    assert str(doctor.check_memory()) == line


def test_no_torch_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: object) -> object:
        if name == "torch":
            raise ImportError("libtorch.so: cannot open")
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_torch)
    said = "libtorch.so: cannot open"
    assert str(doctor.check_torch()) == (
        f"fail  torch     cannot be imported ({said}); run make serve, or pip install -e ."
    )
    assert str(doctor.check_gpu(Settings())) == f"warn  gpu       unknown ({said}); see torch"


@pytest.mark.parametrize(
    ("library", "level", "end"),
    [
        (None, Severity.WARN, "; install g++ to have the fast ones (Debian: apt-get install g++)"),
        (Path("kernels.so"), Severity.OK, "; none is needed: the native kernels are prebuilt"),
    ],
)
def test_no_compiler_is_a_warning_unless_kernels_are_prebuilt(
    monkeypatch: pytest.MonkeyPatch, library: Path | None, level: Severity, end: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(prebuilt, "find", lambda *_: library)
    check = doctor.check_compiler()
    assert check.level is level
    assert str(check).endswith(end)


def test_the_compiler_is_the_one_that_builds_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/true -O1")
    assert doctor.check_compiler().text == "/bin/true -O1"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "/nowhere/c++ not found" in doctor.check_compiler().text


def test_kernels_that_cannot_be_built_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: object) -> None:
        raise native.NativeUnavailable("no C++ compiler")

    monkeypatch.setattr(native, "load_library", unavailable)
    said = "plain torch: no C++ compiler; a C++ compiler makes them native"
    assert str(doctor.check_kernels()) == f"warn  kernels   {said}"


@pytest.mark.parametrize(
    ("said", "better", "line"),
    [
        (["building"], None, "ok    kernels   native, avx2: AVX2"),
        (
            ["an old one is ignored", "building"],
            (SimpleNamespace(name="amx"), "no AMX"),
            "warn  kernels   native, avx2: AVX2, an old one is ignored, no amx: no AMX",
        ),
    ],
)
def test_kernels_are_told_with_what_keeps_better_ones_away(
    monkeypatch: pytest.MonkeyPatch, said: list[str], better: object, line: str
) -> None:
    def load(say: Callable[[str], None]) -> object:
        for text in said:
            say(text)
        return SimpleNamespace(level="avx2", text="AVX2")

    monkeypatch.setattr(native, "load_library", load)
    monkeypatch.setattr(doctor, "this_machine", lambda: SimpleNamespace(better=lambda: better))
    assert str(doctor.check_kernels()) == line


def test_a_model_of_the_hub_is_not_fetched_for_a_look() -> None:
    check = doctor.check_model(Settings(model="somebody/something"))
    assert str(check) == "ok    model     somebody/something comes from the hub, unless it was fetched before"


def test_the_types_of_a_model_and_what_they_take() -> None:
    (check,) = doctor.check_types(Settings(device="cpu", quantize="int8", kv_dtype="int8"))
    assert check.level is Severity.OK
    assert check.text == "weights int8, 4.9 MiB; KV cache int8, 1.06 KiB a token"
    (check,) = doctor.check_types(Settings(device="cpu", dtype="float16"))
    assert check.text == "weights float16, 6.8 MiB; KV cache float16, 2.00 KiB a token"


def test_what_a_server_would_refuse_fails(tmp_path: Path) -> None:
    """Its files are read as a server reads them, all but the weights."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    settings = Settings(model=str(folder), device="cpu")
    assert [check.level for check in doctor.check_types(settings)] == [Severity.OK]
    (check,) = doctor.check_types(Settings(model=str(folder), device="cpu", max_model_len=1 << 20))
    assert check.text.startswith("max_model_len 1048576 is more than")
    (folder / "chat_template.jinja").write_text("{% if %}")
    (check,) = doctor.check_types(settings)
    assert check.text.startswith(f"{folder}: the chat template is broken: ")
    (folder / "chat_template.jinja").unlink()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    (check,) = doctor.check_types(settings)
    assert "model.layers.0.mlp.down_proj.weight is missing" in check.text


def test_types_that_cannot_be_served_fail(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)  # 112 inputs of down_proj
    (check,) = doctor.check_types(Settings(model=str(tmp_path), device="cpu", quantize="int4"))
    assert check.level is Severity.FAIL
    assert "--quantize int4: groups of 32 or 64 do not divide" in check.text
    assert list(doctor.check_types(Settings(model="somebody/something"))) == []
