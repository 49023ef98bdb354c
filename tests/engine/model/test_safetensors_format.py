"""The safetensors reader: every dtype bit for bit, and files that are broken in every way that bytes can be."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.engine.errors import CheckpointError
from penstock.engine.model.parse import read_config
from penstock.engine.model.safetensors import DTYPES, INDEX, SINGLE, TensorFiles
from penstock.engine.model.tensors import check_tensors
from tests.engine.checkpoints import make_checkpoint
from tests.few import examples

Header = dict[str, Any]


def encode(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[int], start: int, dtype: str = "F32", size: int = 4) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + math.prod(shape) * size]}


def files(folder: Path, content: bytes) -> TensorFiles:
    (folder / SINGLE).write_bytes(content)
    return TensorFiles(folder)


def refused(folder: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        files(folder, content)
    message = str(caught.value)
    assert SINGLE in message
    assert "\n" not in message
    return message


# What is right


def resident_bytes(file: Path) -> int:
    """The memory of this process that is the file's."""
    found, is_its = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "Rss" and is_its:
            found += int(value.split()[0]) << 10
        elif "-" in name.split()[0]:
            is_its = line.endswith(str(file))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a file is read from /proc")
def test_what_was_read_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    save_file({"all": torch.ones(1 << 20)}, tmp_path / SINGLE)
    found = TensorFiles(tmp_path)
    tensor = found.read("all")
    assert tensor.sum() == 1 << 20
    assert resident_bytes(tmp_path / SINGLE) >= 4 << 20
    found.give_back()
    assert resident_bytes(tmp_path / SINGLE) == 0
    assert tensor.sum() == 1 << 20


@pytest.mark.parametrize("name", DTYPES)
def test_values_come_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    """All patterns of the 8-bit and 16-bit types, NaN payloads and subnormals included; as many of wider ones."""
    dtype = DTYPES[name]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = torch.arange(1 << 16) * 65_537
    tensor = (patterns % 2 if dtype == torch.bool else patterns).to(bits).view(dtype)
    save_file({"all": tensor.view(256, -1)}, tmp_path / SINGLE)
    found = TensorFiles(tmp_path).read("all")
    assert found.dtype == dtype
    assert found.shape == (256, 256)
    assert torch.equal(found.view(bits), tensor.view(256, -1).view(bits))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 4), max_size=4)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_any_file_that_safetensors_writes_is_read(
    shapes: dict[str, tuple[str, list[int]]], with_metadata: bool
) -> None:
    tensors = {
        name: torch.arange(math.prod(shape)).to(DTYPES[dtype]).view(shape)
        for name, (dtype, shape) in shapes.items()
    }
    with TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / SINGLE, metadata={"format": "pt"} if with_metadata else None)
        found = TensorFiles(Path(folder))
        assert found.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found.entries[name].shape == tuple(tensor.shape)
            assert found.entries[name].num_bytes == tensor.nbytes
            assert torch.equal(found.read(name), tensor)


def test_a_number_alone_is_a_tensor_without_dimensions(tmp_path: Path) -> None:
    found = files(tmp_path, encode({"a": entry([], 0)}, bytes([0, 0, 128, 63])))
    assert torch.equal(found.read("a"), torch.tensor(1.0))


def test_a_header_of_any_length_may_come_first(tmp_path: Path) -> None:
    for padding in range(9):
        header = json.dumps({"a": entry([1], 0)}).encode() + b" " * padding
        assert files(tmp_path, encode(header, bytes([0, 0, 128, 63]))).read("a").tolist() == [1.0]


def test_who_writes_into_a_tensor_does_not_write_into_the_file(tmp_path: Path) -> None:
    content = encode({"a": entry([2], 0)}, bytes(8))
    found = files(tmp_path, content)
    found.read("a").fill_(3.0)
    assert (tmp_path / SINGLE).read_bytes() == content
    assert TensorFiles(tmp_path).read("a").tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "size"), [("F64", 8), ("I64", 8), ("I32", 4), ("U8", 1), ("BOOL", 1), ("F8_E4M3", 1)]
)
def test_other_types_are_listed_and_refused_only_where_they_are_needed(
    tmp_path: Path, dtype: str, size: int
) -> None:
    make_checkpoint("llama", tmp_path)
    (tmp_path / "norm.safetensors").write_bytes(
        encode({"model.norm.weight": entry([64], 0, dtype, size)}, bytes(64 * size))
    )
    weight_map = dict.fromkeys(TensorFiles(tmp_path).entries, "most.safetensors")
    weight_map["model.norm.weight"] = "norm.safetensors"
    (tmp_path / SINGLE).rename(tmp_path / "most.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = TensorFiles(tmp_path)
    assert found.entries["model.norm.weight"].dtype == dtype
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight is {dtype}, which is not supported"):
        check_tensors(read_config(tmp_path), found)


# Shards


def test_only_shards_that_the_index_names_are_opened(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    (tmp_path / "three.safetensors").write_bytes(b"rubbish")
    (tmp_path / SINGLE).write_bytes(b"rubbish")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "also": "one.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = TensorFiles(tmp_path)
    assert sorted(found.entries) == ["a", "b"]
    assert found.read("b").tolist() == [1.0] * 3
    assert found.entries["a"].file == tmp_path / "one.safetensors"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"weight_map": 3}', "weight_map must be an object"),
        ('{"weight_map": {"a": 3}}', "a must be a string"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors is missing"),
        ('{"weight_map": {"a": ""}}', "is missing"),
        ('{"weight_map": {"a": "a\\u0000b"}}', "is missing"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        TensorFiles(tmp_path)


# What is wrong


@pytest.mark.parametrize("length", [0, 61, 1 << 20, 100_000_001, 1 << 63, (1 << 64) - 1])
def test_a_header_length_that_cannot_be_is_refused(tmp_path: Path, length: int) -> None:
    content = length.to_bytes(8, "little") + json.dumps({}).encode().ljust(40)
    assert "truncated or is no safetensors file" in refused(tmp_path, content)


def test_a_header_beyond_the_bound_is_not_even_read(tmp_path: Path) -> None:
    """The file has that many bytes, though they take no room: all after the first eight is a hole."""
    file = tmp_path / SINGLE
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    with file.open("r+b") as opened:
        opened.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="truncated or is no safetensors file"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        None,
        3,
        "F32",
        [],
        [["dtype", "F32"]],
        {},
        {"dtype": "F32"},
        {"dtype": "F32", "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": 3, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [[2]], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**80], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": []},
        {"dtype": "F32", "shape": [2], "data_offsets": 8},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [2**70, 2**70 + 8]},
    ],
)
def test_an_entry_that_says_nothing_sensible_is_refused(tmp_path: Path, values: object) -> None:
    refused(tmp_path, encode({"a": values}, bytes(8)))


@pytest.mark.parametrize(
    "text", [b"", b"null", b"3", b'"a"', b"[]", b"{", b"{}}", b"\x00\x01", b"\xff\xfe{}", b'{"a" 1}']
)
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    refused(tmp_path, encode(text, bytes(8)))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    return make_checkpoint(
        "llama", folder, hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=8
    )


def survives(good: Path, content: bytes) -> bool:
    """False after a CheckpointError of one line; otherwise every tensor of the model can be read in its shape."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes((good / "config.json").read_bytes())
        (folder / SINGLE).write_bytes(content)
        try:
            found = TensorFiles(folder)
            check_tensors(read_config(folder), found)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return False
        sizes = TensorFiles(good).entries
        for tensor_name, whole in sizes.items():
            assert found.read(tensor_name).shape == whole.shape
        return True


def test_the_unchanged_file_survives(good: Path) -> None:
    assert survives(good, (good / SINGLE).read_bytes())


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_give_a_model_or_a_checkpoint_error(good: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray((good / SINGLE).read_bytes())
    for place, byte in changes:
        content[place % len(content)] = byte
    survives(good, bytes(content))


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_a_file_that_ends_early_is_refused(good: Path, data: st.DataObject) -> None:
    content = (good / SINGLE).read_bytes()
    keep = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 1_200))
    with TemporaryDirectory() as folder:
        assert "truncated" in refused(Path(folder), content[:keep])


@pytest.mark.parametrize("more", range(-1, 9))
def test_a_file_that_ends_where_its_header_is_about_to_is_refused(
    good: Path, more: int, tmp_path: Path
) -> None:
    content = (good / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert "truncated" in refused(tmp_path, content[: length + more])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.sampled_from(["model.norm.weight", "lm_head.weight", "__metadata__", "new"]),
    st.sampled_from(["dtype", "shape", "", "more"]),
    json_values,
)
def test_any_json_in_the_header_gives_a_model_or_a_checkpoint_error(
    good: Path, name: str, field: str, value: object
) -> None:
    content = (good / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if field:
        header.setdefault(name, {})[field] = value
    else:
        header[name] = value
    survives(good, encode(header, content[8 + length :]))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10**5), st.integers(-100, 10**5) | st.just(64))
def test_offsets_are_right_within_the_file_and_refused_beyond_it(good: Path, start: int, size: int) -> None:
    content = (good / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [start, start + size]
    data = content[8 + length :]
    assert survives(good, encode(header, data)) == (size == 64 and start + size <= len(data))
