"""A fault ends what it concerns and nothing else, and a broken checkpoint is told, never half read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.engine import EngineState
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.parse import parse_config, read_generation_defaults
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.planning.device import DeviceError
from penstock.engine.planning.request import FinishReason
from tests.engine.checkpoints import make_config
from tests.engine.test_engine_faults import EngineHarness


def reason(harness: EngineHarness, name: str) -> FinishReason | None:
    outputs = harness.outputs(name)
    return outputs[-1].finish_reason if outputs else None


def test_text_that_fails_ends_its_own_request_only() -> None:
    harness = EngineHarness()
    harness.sink.hated = "bad"
    harness.submit("good", [1, 2, 3], max_tokens=1)
    harness.submit("bad", [4, 5, 6], max_tokens=1)
    harness.start()
    harness.wait_for(lambda: reason(harness, "good") is not None and reason(harness, "bad") is not None)
    assert reason(harness, "good") is FinishReason.LENGTH
    assert reason(harness, "bad") is FinishReason.FAILED
    assert harness.engine.state is EngineState.READY
    harness.engine.stop()


def test_an_engine_whose_receiver_always_raises_says_that_it_failed() -> None:
    harness = EngineHarness()
    harness.faults += [LookupError("nobody home")] * 9
    harness.start()
    harness.submit("r", [1, 2, 3], max_tokens=3)
    harness.expect(EngineState.FAILED)
    assert harness.engine.state is EngineState.FAILED


def test_a_cancel_is_answered_although_the_device_fails_in_the_same_turn() -> None:
    harness = EngineHarness()
    harness.runner.gate = type(harness.runner.gate)(0)
    harness.start()
    harness.submit("a", [1, 2, 3], max_tokens=50)
    harness.runner.entered.get(timeout=20)
    harness.submit("b", [4, 5, 6], max_tokens=50)
    harness.engine.cancel("a")
    harness.runner.gate.release()  # the step of "a" ends; the next turn answers the cancel and steps "b"
    harness.runner.entered.get(timeout=20)
    harness.runner.always = DeviceError("lost")
    harness.runner.gate.release()
    harness.expect(EngineState.FAILED)
    assert reason(harness, "a") is FinishReason.CANCELLED
    assert reason(harness, "b") is FinishReason.FAILED


def safetensors(folder: Path, header: bytes, data: bytes = b"\0" * 64) -> TensorFiles:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return TensorFiles(folder)


@pytest.mark.parametrize(
    ("shape", "offsets", "dtype"),
    [
        ([1], [-4, 0], "F32"),
        ([2**62, 4], [0, 0], "F32"),
        ([-1, -1], [0, 4], "F32"),
        ([-1], [4, 0], "F32"),
        ([1], [8, 0], "I64"),
    ],
)
def test_offsets_and_shapes_that_cannot_be_are_refused(
    tmp_path: Path, shape: list[int], offsets: list[int], dtype: str
) -> None:
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    with pytest.raises(CheckpointError, match="safetensors"):
        safetensors(tmp_path, header)


def test_a_tensor_without_elements_is_read(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}}).encode()
    assert safetensors(tmp_path, header).read("t").shape == (0, 3)


def test_nesting_without_end_is_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        safetensors(tmp_path, b"[" * 100_000)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Fields.read(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", -1),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**18),
        ("hidden_size", 0),
        ("head_dim", 0),
        ("intermediate_size", -3),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
    ],
)
def test_a_size_that_cannot_be_is_named(field: str, value: Any) -> None:
    config = {**make_config("llama"), field: value}
    config.pop("rope_parameters", None)
    with pytest.raises(CheckpointError, match=field):
        parse_config(Fields("config.json", config))


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "loose_attention"]])
def test_layer_types_must_say_it_of_every_layer(kinds: list[str]) -> None:
    config = {
        **make_config("qwen2"),
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "layer_types": kinds,
    }
    with pytest.raises(CheckpointError, match="layer_types"):
        parse_config(Fields("config.json", {**config, "sliding_window": 8}))


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -3), ("top_p", 7), ("min_p", 2), ("repetition_penalty", 0)]
)
def test_a_recommendation_out_of_range_is_named(tmp_path: Path, field: str, value: float) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=field):
        read_generation_defaults(tmp_path)
