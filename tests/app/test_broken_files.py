"""Files that an operator hands over broken: each is told in one line that names it, and the command exits with 2."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from penstock.app.build import build, build_core
from penstock.app.errors import OperatorError
from penstock.app.settings import Settings
from penstock.gateway.access.keys import digest_of
from tests.app.command import penstock

KEY = "alice-0123456789abcdef"
HASHED = f"sha256:{digest_of(KEY).hex()}"

Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(LLAMA_TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(*arguments: str, status: int = 2) -> str:
    """Returns the last line that the command writes before it gives up; earlier lines may only report progress."""
    done = penstock(*arguments)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert last.startswith("penstock: ")
    assert not [line for line in before if " starting on " not in line and " loading " not in line]
    return last


def serve(*arguments: str) -> str:
    return refusal("serve", "--port", "0", *arguments)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_tensors(folder: Path, header: dict[str, object], content: bytes = b"") -> None:
    """A safetensors file with this header and no more content than given."""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)


@pytest.mark.parametrize(
    ("break_", "named"),
    [
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda folder: (folder / "config.json").write_text(""), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"), "config.json cannot be read"),
        (lambda folder: change_config(folder, hidden_size="64"), "hidden_size must be a whole number"),
        (
            lambda folder: change_config(folder, num_hidden_layers=1_000_000),
            "num_hidden_layers must be between",
        ),
        (lambda folder: change_config(folder, num_attention_heads=3), "3 heads cannot share 2"),
        (lambda folder: change_config(folder, architectures=[]), "architectures"),
        (
            lambda folder: change_config(folder, architectures=["GPT2LMHeadModel"]),
            "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM",
        ),
        (
            lambda folder: change_config(folder, quantization_config={"quant_method": "aqlm"}),
            "quant_method aqlm is not supported",
        ),
        (
            lambda folder: change_config(folder, rope_scaling={"rope_type": "ntk", "factor": 2.0}),
            "rope_type ntk is not supported",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("nonsense"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is not"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"temperature": "hot"}'),
            "generation_config.json: temperature must be a number",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_description_is_told_before_anything_is_loaded(
    model: Path, break_: Break, named: str
) -> None:
    break_(model)
    with pytest.raises(OperatorError) as caught:
        build(Settings(model=str(model)))
    assert str(caught.value).startswith(str(model))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_an_end_is_served_with_a_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_core(Settings(model=str(model)), lambda _: None, lambda _: None)
    assert not caplog.messages
    change_config(model, eos_token_id=None)
    for name in ("generation_config", "tokenizer_config", "special_tokens_map"):
        (model / f"{name}.json").write_text("{}")
    build_core(Settings(model=str(model)), lambda _: None, lambda _: None)
    (said,) = caplog.messages
    assert said.startswith(f"{model} names no end of a text (eos_token_id in config.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_the_command_tells_it_in_one_line(model: Path, name: str) -> None:
    (model / name).write_bytes(b"\xff\xfe{")
    assert serve("--model", str(model)).startswith(f"penstock: {model / name} cannot be read: ")


@pytest.mark.parametrize(
    ("break_", "named"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "truncated"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors at all" * 10),
            "model.safetensors",
        ),
        (lambda folder: change_config(folder, hidden_size=96), "hidden_size"),
        (lambda folder: change_config(folder, num_hidden_layers=3), "num_hidden_layers"),
        (
            lambda folder: write_tensors(
                folder,
                {
                    "model.embed_tokens.weight": {
                        "dtype": "I8",
                        "shape": [1024, 64],
                        "data_offsets": [0, 65536],
                    }
                },
                bytes(65536),
            ),
            "is I8, which is not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_weights_are_told(model: Path, break_: Break, named: str) -> None:
    break_(model)
    last = serve("--model", str(model))
    assert str(model) in last
    assert named in last


def test_a_shard_that_is_missing_is_told_by_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {"model.embed_tokens.weight": 1, "model.norm.weight": 2}
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in names.items()}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model-00002-of-00002.safetensors" in serve("--model", str(model))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "there is no key in it"),
        (f"alice:{HASHED}\n\nbob:{HASHED}\n".encode(), "line 3: another tenant has this key already"),
        (
            f"alice:{HASHED}\nbob:{KEY}\n".encode(),
            "line 2: not `NAME:sha256:DIGEST`; `penstock key NAME --hash`",
        ),
        (f"alice:{HASHED}\n\xe9\n".encode("latin-1"), "not UTF-8"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_told_and_no_key_is(
    tmp_path: Path, content: bytes, named: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    last = serve("--api-keys-file", str(path))
    assert f"--api-keys-file {path}" in last
    assert named in last
    assert KEY not in last


def test_a_folder_is_no_file_of_keys(tmp_path: Path) -> None:
    assert serve("--api-keys-file", str(tmp_path)).endswith(f"--api-keys-file {tmp_path}: Is a directory")


def test_a_file_of_settings_is_told_with_the_line_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("threads = 2\nmodel = tiny\n")
    last = serve("--config", str(path))
    assert f"--config {path}: not TOML" in last
    assert "line 2" in last


def test_a_port_in_use_is_told_first(tmp_path: Path) -> None:
    """Before the model is looked at: who starts a server twice is not told about anything else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        last = refusal("serve", "--port", str(port), "--model", str(tmp_path / "nowhere"), status=75)
    assert last.startswith(f"penstock: --port {port}: another program listens there already")
