"""A fault ends what it concerns and nothing else, and a broken checkpoint is told, never half read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from engine.engine import EngineState
from engine.errors import CheckpointError
from engine.fields import Fields
from engine.model.parse import parse_config, read_generation_defaults
from engine.model.safetensors import TensorFiles
from engine.planning.request import FinishReason
from engine.planning.step import DeviceError
from tests.engine.checkpoints import make_config
from tests.engine.test_engine_faults import Workshop


def reason(workshop: Workshop, name: str) -> FinishReason | None:
    outputs = workshop.outputs(name)
    return outputs[-1].finish_reason if outputs else None


def test_text_that_fails_ends_its_own_request_only() -> None:
    workshop = Workshop()
    workshop.sink.hated = "bad"
    workshop.submit("good", [1, 2, 3], max_tokens=1)
    workshop.submit("bad", [4, 5, 6], max_tokens=1)
    workshop.start()
    workshop.wait_for(lambda: reason(workshop, "good") is not None and reason(workshop, "bad") is not None)
    assert reason(workshop, "good") is FinishReason.LENGTH
    assert reason(workshop, "bad") is FinishReason.FAILED
    assert workshop.engine.state is EngineState.READY
    workshop.engine.stop()


def test_an_engine_whose_receiver_always_raises_says_that_it_failed() -> None:
    workshop = Workshop()
    workshop.faults += [LookupError("nobody home")] * 9
    workshop.start()
    workshop.submit("r", [1, 2, 3], max_tokens=3)
    workshop.expect(EngineState.FAILED)
    assert workshop.engine.state is EngineState.FAILED


def test_a_cancel_is_answered_although_the_device_fails_in_the_same_turn() -> None:
    workshop = Workshop()
    workshop.runner.gate = type(workshop.runner.gate)(0)
    workshop.start()
    workshop.submit("a", [1, 2, 3], max_tokens=50)
    workshop.runner.entered.get(timeout=20)
    workshop.submit("b", [4, 5, 6], max_tokens=50)
    workshop.engine.cancel("a")
    workshop.runner.gate.release()  # the step of "a" ends; the next turn answers the cancel and steps "b"
    workshop.runner.entered.get(timeout=20)
    workshop.runner.always = DeviceError("lost")
    workshop.runner.gate.release()
    workshop.expect(EngineState.FAILED)
    assert reason(workshop, "a") is FinishReason.CANCELLED
    assert reason(workshop, "b") is FinishReason.FAILED


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
