"""`penstock doctor MODEL` says what a server would then do, and reads no more than it has to."""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
import torch
from huggingface_hub import constants, hf_api
from safetensors.torch import load_file

from penstock.app import fitting
from penstock.app.build import load_options
from penstock.app.cli import _parse_settings, _Parser, main
from penstock.app.doctor import Check, Severity
from penstock.app.estimate import estimate
from penstock.app.fitting import Fitting, _tables, ladder
from penstock.app.settings import Settings
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.execution import loader, memory
from penstock.engine.execution.memory import Budget, GpuMemory, card_budget
from penstock.engine.fields import Fields
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.gguf.config import read_config as gguf_config
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.quant import checkpoints
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.kept import KeptTensors
from penstock.engine.quant.storage import PLAIN
from penstock.engine.sizes import GIB
from tests.engine.checkpoints import make_checkpoint, make_config, save_tensors, tensor_shapes
from tests.engine.gguf_files import same, write_gguf

LARGE = make_config(
    "llama",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    dtype="bfloat16",
)
"""The shape has about a billion parameters."""


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a compiler, and nothing of the environment counts."""
    monkeypatch.setattr(fitting, "check_compiler", lambda: Check(Severity.OK, "compiler", "c++"))
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are a hole in a file: nobody may read them."""
    folder = tmp_path_factory.mktemp("large")
    entries, end = {}, 0
    for name, shape in tensor_shapes(LARGE).items():
        start, end = end, end + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    (folder / "config.json").write_text(json.dumps(LARGE))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def large_config() -> ModelConfig:
    return parse_config(Fields("config.json", LARGE))


def tell(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    """The lines of `penstock doctor`."""
    assert main(["doctor", *arguments, "--device", "cpu"]) == status
    return capsys.readouterr().out.splitlines()


def has_row(lines: list[str], *cells: str) -> bool:
    """Whether a row of a table starts with these words."""
    return any(line.split()[: len(cells)] == list(cells) for line in lines)


# What is said is what is then done


@pytest.mark.parametrize("flags", [[], ["--quantize", "int4"], ["--dtype", "float32", "--kv-dtype", "int8"]])
def test_the_choice_is_that_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "a model", intermediate_size=96)

    def native(_: ModelConfig, device: torch.device, dtype: torch.dtype, *__: object) -> Any:
        return reference_kernels(device, dtype, dtype)

    monkeypatch.setattr(loader, "select", native)
    lines = tell(capsys, str(folder), *flags)
    plain, every = (
        line.strip().removeprefix("penstock serve ") for line in lines if line.startswith("  penstock serve")
    )
    said = []
    for command in (plain, every):
        settings = Settings.load(_parse_settings(_Parser(), shlex.split(command), Settings))
        assert settings.model == str(folder)
        model = loader.load_model(folder, load_options(settings), lambda _: None, lambda *_: None)
        said.append(
            (
                model.kernels.embedding_dtype,
                model.kernels.kv_dtype,
                model.memory.num_blocks,
                model.memory.weights,
                min(model.max_model_len, model.memory.num_tokens),
            )
        )
    assert said[0] == said[1]
    settings = Settings.load(_parse_settings(_Parser(), shlex.split(every), Settings))
    assert (settings.num_blocks, settings.max_model_len) == (said[0][2], said[0][4])
    assert [settings.dtype, settings.kv_dtype] == [str(dtype).removeprefix("torch.") for dtype in said[0][:2]]


def test_the_tables_have_the_sizes_of_every_type(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tell(capsys, str(large), "--dtype", "bfloat16")
    parameters = sum(prod(shape) for shape in tensor_shapes(LARGE).values())
    assert f" {parameters / 1e6:,.1f} M parameters, stored in bfloat16, 32,768 positions" in lines[0]
    assert lines[1] == f"from    {large}"
    assert has_row(lines, "bfloat16", "*", f"{2 * parameters / GIB:.2f}", "GiB")
    assert has_row(lines, "float32", f"{4 * parameters / GIB:.2f}", "GiB")
    kv = 2 * 16 * 8 * 64
    for name, size in (("float32", 4 * kv), ("float16", 2 * kv), ("int8", kv + 2 * 16 * 8 * 4)):
        assert has_row(lines, name, f"{size / 1024:,.2f}", "KiB")


def test_a_card_keeps_kv_in_the_type_of_its_weights_and_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fitting = Fitting(
        large_config(), card_budget(GpuMemory(total=16 * GIB, free=16 * GIB), 0.9), has_native=True
    )
    shown = fitting.case(LoadOptions(device="cuda", dtype="bfloat16"))
    lines = "\n".join(_tables(fitting, shown)).splitlines()
    kv = 2 * 16 * 8 * 64
    for name, size in (("bfloat16", 2 * kv), ("int8", kv + 2 * 16 * 8 * 4)):
        mark = ["*"] if name == "bfloat16" else []
        assert has_row(lines, name, *mark, f"{size / 1024:,.2f}", "KiB")
    assert not has_row(lines, "float32", f"{4 * kv / 1024:,.2f}", "KiB")


def test_streams_are_what_the_blocks_hold() -> None:
    options = LoadOptions(device="cpu", num_blocks=1001, dtype="bfloat16")
    sizes = estimate(large_config(), options, Budget(64 * GIB, 0.25))
    assert [sizes.num_streams(context) for context in (16, 2048, 2049, 16000, 16001)] == [256, 7, 7, 1, 0]
    few = estimate(large_config(), replace(options, max_num_seqs=3), Budget(64 * GIB, 0.25))
    assert few.num_streams(2048) == 3
    assert estimate(large_config(), options, Budget(GIB, 0.25)).num_streams(16) == 0


def test_behind_a_window_a_stream_takes_no_more() -> None:
    config = parse_config(Fields("config.json", make_config("mistral", sliding_window=64)))
    sizes = estimate(config, LoadOptions(device="cpu", num_blocks=61), Budget(GIB, 0.25))
    assert [sizes.num_streams(context) for context in (32, 64, 200, 512)] == [30, 15, 12, 12]
    assert sizes.max_model_len == 512


# The verdict


def needed(**options: Any) -> int:
    """The memory that the smallest cache fits into."""
    sizes = estimate(large_config(), LoadOptions(device="cpu", **options), Budget(0, 0.25))
    return sizes.plan.needed


@pytest.mark.parametrize(
    ("enough_for", "verdict", "status"),
    [
        ({}, "fits: ", 0),
        ({"quantize": "int8"}, "fits with --quantize int8: int8 weights and bfloat16 KV (*), ", 0),
        ({"quantize": "int4"}, "fits with --quantize int4: int4 weights and bfloat16 KV (*), ", 0),
        ({"quantize": "nf4"}, "fits with --quantize nf4: nf4 weights and bfloat16 KV (*), ", 0),
        (
            {"quantize": "nf4", "kv_dtype": "int8"},
            "fits with --quantize nf4 --kv-dtype int8: nf4 weights and int8 KV (*), ",
            0,
        ),
        (None, "does not fit: needs ", 1),
    ],
)
def test_the_first_that_fits_is_the_verdict(
    large: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    enough_for: dict[str, Any] | None,
    verdict: str,
    status: int,
) -> None:
    smallest = needed(dtype="bfloat16", quantize="nf4", kv_dtype="int8")
    available = smallest - 1 if enough_for is None else needed(dtype="bfloat16", **enough_for)
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    lines = tell(capsys, str(large), "--dtype", "bfloat16", status=status)
    (line,) = [line for line in lines if line.startswith(("fits", "does not fit"))]
    assert line.startswith(verdict)
    if enough_for is None:
        assert line.endswith(f" of {available / GIB:.2f} GiB, even with --quantize nf4 --kv-dtype int8")
    elif enough_for:
        assert line.endswith("sequences of up to 1,024 tokens of 32,768")


def test_what_the_operator_said_is_not_changed() -> None:
    config = large_config()
    assert [way.quantize for way in ladder(LoadOptions(quantize="int8", kv_dtype="float16"), config)] == [
        "int8"
    ]
    quantized = replace(config, quantization=Fields("config.json", {}))
    assert {way.quantize for way in ladder(LoadOptions(), quantized)} == {None}


def test_what_cannot_be_quantized_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tell(capsys, str(make_checkpoint("llama", tmp_path)))
    refused = [line for line in lines if line.startswith("not ")]
    for line, name in zip(refused, ("int4", "nf4"), strict=True):
        assert line.startswith(f"not {name}: --quantize {name}: groups of 32 or 64 do not divide")
    assert has_row(lines, "int8")
    assert not has_row(lines, "int4")


def test_without_a_compiler_all_is_float32(
    large: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "check_compiler", lambda: Check(Severity.WARN, "compiler", "none"))
    lines = tell(capsys, str(large))
    assert "plain torch serves, in float32" in lines[5]
    assert any(line.startswith("fits: float32 weights and float32 KV (*)") for line in lines)
    assert not any(line.startswith("bfloat16 *") for line in lines)


def test_a_card_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (78 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    folder = make_checkpoint("llama", tmp_path, intermediate_size=96, dtype="float16")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", printed.append)
        assert fitting.run(str(folder), Settings.load({"device": "cuda"}), {"device": "cuda"}) == 0
    lines = "\n".join(printed).splitlines()
    assert lines[3] == "device  A Card, 70.00 GiB for the model; 78.00 GiB of 80.00 GiB are free"
    assert any(line.startswith("fits: float16 weights and float16 KV (*)") for line in lines)
    assert f"  penstock serve --model {folder} --device cuda" in lines


def test_a_checkpoint_that_is_quantized_is_told_with_its_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = KeptTensors(Integers(8, 32))
    monkeypatch.setitem(
        checkpoints.METHODS, "gptq", lambda _: lambda name: stored if "proj" in name else PLAIN
    )
    folder = make_checkpoint(
        "llama",
        tmp_path,
        intermediate_size=96,
        dtype="bfloat16",
        quantization_config={"quant_method": "gptq"},
    )
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj" in name]:
        packed = stored.quantized.quantize(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in packed.items()}
    save_tensors(folder, tensors)
    lines = tell(capsys, str(folder), "--dtype", "bfloat16")
    assert "stored in gptq (int8 from the cache)" in lines[0]
    sizes = estimate(read_config(folder), LoadOptions(device="cpu", dtype="bfloat16"), Budget(GIB, 0.25))
    assert has_row(lines, "bfloat16", "*", f"{sizes.weights / (1 << 20):.1f}", "MiB")
    assert not has_row(lines, "int4")


def test_a_gguf_file_is_a_model_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", intermediate_size=96)
    path = write_gguf(folder, tmp_path / "model.gguf", same("Q8_0"))
    lines = tell(capsys, str(path), "--dtype", "bfloat16")
    assert "stored in gguf (Q8_0)" in lines[0]
    stored = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)
    num_others = stored["F32"] - 1  # rope_freqs.weight belongs to the config
    assert lines[2] == f"types   {stored['Q8_0']} Q8_0, {num_others} F32"
    assert lines[1] == f"from    {path}"
    sizes = estimate(gguf_config(path), LoadOptions(device="cpu", dtype="bfloat16"), Budget(GIB, 0.25))
    assert has_row(lines, "bfloat16", "*", f"{sizes.weights / (1 << 20):.1f}", "MiB")
    assert f"  penstock serve --model {path} --dtype bfloat16 --device cpu" in lines


# The hub


_URL = "/{repo_id}/resolve/{revision}/{filename}"


class Hub(BaseHTTPRequestHandler):
    """Serves the folder `root` as the hub serves a repository, and counts the bytes that it sends of each file."""

    root: ClassVar[Path]
    sent: ClassVar[dict[str, int]]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        repository, _, name = self.path.partition("/resolve/main/")
        path = self.root / name
        if repository != "/somebody/something" or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if "somebody" in repository else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha1(path.read_bytes()).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c0ffee" * 6 + "c0ff")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)
            self.sent[name] = self.sent.get(name, 0) + len(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub whose one model is in the folder "model", and an empty cache of it."""

    class OwnHub(Hub):
        root = tmp_path / "model"
        sent: ClassVar[dict[str, int]] = {}

    with ThreadingHTTPServer(("127.0.0.1", 0), OwnHub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + _URL)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hf_api.api, "endpoint", address)
        yield OwnHub
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_of_a_model_on_the_hub_only_headers_are_fetched(
    hub: type[Hub], capsys: pytest.CaptureFixture[str], num_shards: int
) -> None:
    make_checkpoint("llama", hub.root, num_shards=num_shards)
    shards = {path.name for path in hub.root.glob("*.safetensors")}
    total = sum(tensor.nbytes for shard in shards for tensor in load_file(hub.root / shard).values())
    lines = tell(capsys, "somebody/something")
    assert lines[1] == f"from    on the hub, {total / (1 << 20):.1f} MiB to fetch"
    assert any(line.startswith("fits: ") for line in lines)
    assert "  penstock serve --model somebody/something --device cpu" in lines
    assert hub.sent.keys() - shards <= {"config.json", "model.safetensors.index.json"}
    assert sum(hub.sent[shard] for shard in shards) <= num_shards * 100_001 < total
    assert capsys.readouterr().err == ""


def test_a_model_on_the_hub_that_cannot_be_served_is_told_before_it_is_fetched(
    hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("llama", hub.root)
    config = json.loads((hub.root / "config.json").read_text())
    (hub.root / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert main(["doctor", "somebody/something"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: somebody/something: tensor model.layers.3.")
    assert "is missing; config.json says num_hidden_layers 4" in err


@pytest.mark.parametrize("missing", ["somebody/else", "somebody/something"])
@pytest.mark.usefixtures("hub")
def test_what_the_hub_does_not_have_is_a_line(capsys: pytest.CaptureFixture[str], missing: str) -> None:
    assert main(["doctor", missing]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"penstock: {missing}: no such file or directory, and the hub says: ")
    assert err.count("\n") == 1


def test_what_an_earlier_start_has_fetched_is_looked_at_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--somebody--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    folder = make_checkpoint("llama", repository / "snapshots" / "c0ffee")
    assert tell(capsys, "somebody/something")[1] == f"from    {folder}"
    (folder / "model.safetensors").unlink()
    assert main(["doctor", "somebody/something"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("penstock: somebody/something: no such file or directory, and the hub says: ")
    assert said.count("\n") == 1


def test_flags_may_come_before_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = tell(capsys, "--no-cuda-graphs", "--max-num-seqs", "7", "demo")
    assert "  penstock serve --no-cuda-graphs --max-num-seqs 7 --device cpu" in lines
