"""Contents of blocks on their way to the host and back: they come back as they were; a layout says what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.config import LoadOptions
from penstock.engine.execution.block_copies import BlockCopies, StateCopies
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from tests.engine.checkpoints import make_checkpoint
from tests.engine.families import STATES


def load(family: str, folder: Path, kv_dtype: str = "float32") -> LoadedModel:
    if not folder.exists():
        make_checkpoint(family, folder)
    options = LoadOptions(device="cpu", dtype="float32", kv_dtype=kv_dtype, num_blocks=16)
    return load_model(folder, options, lambda _: None, lambda *_: None)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("is_readonly", [False, True])
def test_what_was_copied_comes_back(family: str, kv_dtype: str, is_readonly: bool, tmp_path: Path) -> None:
    model = load(family, tmp_path / family, kv_dtype)
    copies, data = BlockCopies(model), model.kv.data
    data.view(torch.uint8).copy_(torch.randint(0, 255, data.view(torch.uint8).shape, dtype=torch.uint8))
    before = data.clone().view(torch.uint8)
    payloads = copies.copy_out([3, 5]).wait()
    assert [len(payload) for payload in payloads] == [copies.num_bytes] * 2
    data[:, :, [3, 5]] = 0
    copies.copy_in([9, 3], [bytes(payload) if is_readonly else payload for payload in payloads])
    after = data.view(torch.uint8)
    assert torch.equal(after[:, :, [9, 3]], before[:, :, [3, 5]])
    others = [block for block in range(16) if block not in (3, 5, 9)]
    assert torch.equal(after[:, :, others], before[:, :, others])


class FakeEvent:
    """The device has done all at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def test_they_come_back_by_way_of_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU in place of the device, which has no pinned memory."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **rest: empty(*size, **rest))  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    model = load("llama", tmp_path / "llama")
    model = replace(model, features=torch.rand(16, model.kv.block_size, 8))
    copies, data = BlockCopies(model), model.kv.data
    data.copy_(torch.rand(data.shape))
    before = data.clone()
    payloads = copies._from_device([3, 5]).wait()
    assert [bytes(one) for one in payloads] == [bytes(one) for one in copies.copy_out([3, 5]).wait()]
    copies._to_device([9, 4], payloads)
    assert torch.equal(data[:, :, [9, 4]], before[:, :, [3, 5]])
    assert model.features is not None
    assert torch.equal(model.features[[9, 4]], model.features[[3, 5]])


def test_features_of_tokens_go_along(tmp_path: Path) -> None:
    model = load("llama", tmp_path / "llama")
    features = torch.rand(16, model.kv.block_size, 8).to(torch.bfloat16)
    with_them = replace(model, features=features)
    copies, before = BlockCopies(with_them), features.clone()
    assert copies.num_bytes == BlockCopies(model).num_bytes + features[0].nbytes
    payloads = copies.copy_out([2]).wait()
    copies.copy_in([4], payloads)
    assert torch.equal(features[4], before[2])
    assert torch.equal(features[5:], before[5:])


@pytest.mark.parametrize("family", ["Qwen 3.5", "Mamba 2"])
def test_a_state_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=16)
    model = load_model(STATES[family].make(tmp_path), options, lambda _: None, lambda *_: None)
    assert model.states is not None
    copies, data = StateCopies(model), model.states.data
    data.copy_(torch.rand(data.shape))
    before = data.clone()
    payloads = copies.copy_out([3, 2]).wait()
    assert [len(payload) for payload in payloads] == [copies.num_bytes] * 2 == [data[0].nbytes] * 2
    data[[2, 3]] = 0
    copies.copy_in([5, 2], payloads)
    assert torch.equal(data[[5, 2]], before[[3, 2]])
    assert torch.equal(data[6:], before[6:])
    assert copies.layout != BlockCopies(model).layout
    assert bool(BlockCopies(model).num_bytes) == (family != "Mamba 2")


def test_blocks_without_bytes_are_carried_for_nothing(tmp_path: Path) -> None:
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=16)
    model = load_model(STATES["Mamba 2"].make(tmp_path), options, lambda _: None, lambda *_: None)
    BlockCopies(model).copy_in([3, 4], [b"", b""])


def test_layouts_tell_types_and_models_apart(tmp_path: Path) -> None:
    models = [load("llama", tmp_path / "llama", kv_dtype) for kv_dtype in ("float32", "bfloat16", "int8")]
    models.append(load("qwen3", tmp_path / "qwen3"))
    layouts = [BlockCopies(model).layout for model in models]
    assert len({*layouts}) == 4
    assert BlockCopies(load("llama", tmp_path / "llama")).layout == layouts[0]
