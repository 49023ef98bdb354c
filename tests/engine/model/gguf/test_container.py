"""GGUF files as the `gguf` library writes them, and as nobody should: cut, flipped, and full of lies."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config, read_generation_defaults, read_tokenizer
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf.container import forget_headers, read_header
from penstock.engine.model.tensors import check_tensors, make_recipe
from tests.engine.checkpoints import make_checkpoint
from tests.engine.gguf_files import same, write_gguf
from tests.engine.model.gguf.raw_gguf import U32, U64, Raw, text
from tests.few import examples

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **SMALL)


@pytest.fixture(scope="module")
def good(folder: Path) -> Path:
    return write_gguf(folder, folder / "good.gguf", same("Q8_0"))


def refused(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_header_is_what_the_library_reads(good: Path) -> None:
    found, expected = read_header(good), gguf.GGUFReader(good)
    keys = {name for name in expected.fields if not name.startswith("GGUF.")}
    assert found.metadata.keys() == keys
    for key in keys:
        assert found.metadata[key] == pytest.approx(expected.fields[key].contents()), key
    assert len(found.tensors) == len(expected.tensors)
    for tensor in expected.tensors:
        ours = found.tensors[tensor.name]
        assert ours.type.name == tensor.tensor_type.name
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.start, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    assert found.num_bytes <= expected.data_offset < found.num_bytes + 32


def test_a_header_is_kept_until_its_file_changes_or_it_is_forgotten(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.gguf"
    path.write_bytes(good.read_bytes())
    first = read_header(path).metadata
    assert read_header(path).metadata is first
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    second = read_header(path).metadata
    assert second is not first
    assert second == first
    forget_headers()
    assert read_header(path).metadata is not second


def test_every_type_of_metadata_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve 水車")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("texts", ["a", "", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_header(tmp_path / "a.gguf").metadata
    assert {key: value for key, value in found.items() if key != "general.architecture"} == {
        "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "i32": -(2**31), "u64": 2**63, "i64": -(2**63),
        "f32": 0.5, "f64": 0.1, "yes": True, "no": False, "text": "naïve 水車", "ints": [1, -2, 3],
        "floats": [0.5, 0.25], "texts": ["a", "", "é"],
    }  # fmt: skip


def test_tensors_begin_where_the_alignment_says(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    for name in "ab":
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = (tmp_path / "a.gguf").read_bytes()
    for name, tensor in read_header(tmp_path / "a.gguf").tensors.items():
        assert tensor.start % 256 == 0
        assert struct.unpack_from("<3f", content, tensor.start) == (ord(name),) * 3


# Several parts


def test_the_parts_of_a_model_are_one(folder: Path, good: Path, tmp_path: Path) -> None:
    first = write_gguf(folder, tmp_path / "model.gguf", same("Q8_0"), num_parts=3)
    assert first.name == "model-00001-of-00003.gguf"
    found, whole = open_files(first), open_files(good)
    assert {entry.file for entry in found.entries.values()} == set(tmp_path.glob("*.gguf"))
    assert found.entries.keys() == whole.entries.keys()
    for name in whole.entries:
        assert found.read(name).equal(whole.read(name))


def test_a_later_part_is_no_model(folder: Path, tmp_path: Path) -> None:
    first = write_gguf(folder, tmp_path / "model.gguf", num_parts=2)
    second = tmp_path / "model-00002-of-00002.gguf"
    with pytest.raises(
        CheckpointError, match=r"one of 2 parts .* name the first, which ends in -00001-of-00002\.gguf$"
    ):
        read_config(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"^{second} cannot be read: No such file"):
        read_config(first)


def test_a_tensor_is_in_one_part(folder: Path, tmp_path: Path) -> None:
    first = write_gguf(folder, tmp_path / "model.gguf", num_parts=2)
    second = tmp_path / "model-00002-of-00002.gguf"
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=rf"^{second}: tensor \S+ is in another part"):
        read_config(first)


# Files that are wrong


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no GGUF file"),
        (b"GGU", "is no GGUF file"),
        (b"ggml" + bytes(40), "is no GGUF file"),
        (b"GGUF", "is truncated: its header goes on at byte 4 of 4"),
        (Raw(version=1).bytes, "version 1 is not supported; only 2 and 3 are$"),
        (Raw(version=3 << 24).bytes, "is not supported; only 2 and 3 are; its byte order is big-endian"),
        (Raw(num_entries=1).bytes, "is truncated: its header goes on"),
        (Raw(num_entries=2**63).bytes, "says that 9223372036854775808 items follow"),
        (Raw(num_tensors=2**40).bytes, "says that 1099511627776 items follow"),
        (Raw(["a", U32(99)]).bytes, "'a' has a value of type 99"),
        (Raw(["a", U32(9), U32(9), U64(1)]).bytes, "'a' has a value of type 9"),
        (Raw(["a", U32(9), U32(8), U64(2**50)]).bytes, "items follow"),
        (Raw(["a", U32(9), U32(12), U64(5)]).bytes, "is truncated: its header goes on"),
        (Raw(["a", U32(8), U64(2**60)]).bytes, "a string of 1152921504606846976 bytes"),
        (Raw(["a", U32(8), U64(99)]).bytes, "is truncated: its header goes on"),
        (Raw(["a", U32(8), U64(2), b"\xff\xff"]).bytes, "the string at byte .* is not UTF-8"),
        (Raw(["a", U32(4), U32(1)], ["a", U32(4), U32(1)]).bytes, "'a' is there twice"),
        (Raw(["general.alignment", U32(4), U32(12)]).bytes, "general.alignment is 12"),
        (Raw(["general.alignment", U32(8), text("x")]).bytes, "general.alignment must be a whole number"),
        (Raw(["general.alignment", U32(4), U32(0)]).bytes, "general.alignment must be between"),
        (
            Raw().with_tensors(("a", (4,), 0, 0), data=15).bytes,
            r"is truncated: it has .* bytes, and a \(F32\) ends at",
        ),
        (
            Raw().with_tensors(("a", (512,), 11, 0), data=219).bytes,
            r"is truncated: it has .* bytes, and a \(Q3_K\) ends at",
        ),
        (Raw().with_tensors(("a", (4,), 0, 4)).bytes, "a begins at 4, which is no multiple of 32"),
        (Raw().with_tensors(("a", (4,), 8, 0)).bytes, "a has rows of 4, and Q8_0 comes in blocks of 32"),
        (
            Raw().with_tensors(("a", (128,), 10, 0)).bytes,
            "a has rows of 128, and Q2_K comes in blocks of 256",
        ),
        (Raw().with_tensors(("a", (0, 4), 0, 0)).bytes, r"'a' has shape \[4, 0\]"),
        (Raw().with_tensors(("a", (), 0, 0)).bytes, "'a' has 0 dimensions"),
        (Raw().with_tensors(("a", (1,) * 5, 0, 0)).bytes, "'a' has 5 dimensions"),
        (Raw().with_tensors(("a", (2**62, 2**62), 0, 0)).bytes, "is truncated"),
        (Raw().with_tensors(("a", (4,), 0, 2**62)).bytes, "is truncated"),
        (Raw().with_tensors(("a", (4,), 0, 0), ("a", (4,), 0, 0)).bytes, "tensor 'a' is there twice"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    refused(tmp_path / "a.gguf", content, said)


def test_a_file_that_is_nowhere_or_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_header(tmp_path / "a.gguf")


def survives(content: bytes) -> bool:
    """False after a CheckpointError of one line; otherwise the file is a whole model with a tokenizer."""
    with TemporaryDirectory() as name:
        path = Path(name) / "model.gguf"
        path.write_bytes(content)
        try:
            config = read_config(path)
            files = open_files(path)
            check_tensors(config, files, make_recipe(config, LoadOptions()))
            read_generation_defaults(path)
            tokenizer = read_tokenizer(path)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert len(str(error)) < 1000  # noqa: PT017
            return False
        for name in files.entries:
            files.read(name)
        tokenizer.decode(tokenizer.encode("The river runs", add_special=True))
        return True


def frugal(check: Callable[[bytes], bool], content: bytes) -> bool:
    """Checks that this needs no more memory than a few times the file."""
    tracemalloc.start()
    try:
        found = check(content)
        assert tracemalloc.get_traced_memory()[1] < 64 * len(content) + (1 << 22)
        return found
    finally:
        tracemalloc.stop()


def test_a_whole_file_survives(good: Path) -> None:
    assert frugal(survives, good.read_bytes())


@settings(max_examples=examples(40), deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_is_refused(good: Path, share: float) -> None:
    """But for the padding at its end, which nothing needs."""
    content = good.read_bytes()
    cut = content[: int(share * (len(content) - 32))]
    assert not frugal(survives, cut)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_bytes_of_the_header_may_be_anything(good: Path, data: st.DataObject) -> None:
    """Whatever it says then, it is a model, or it is refused in a line."""
    content, size = bytearray(good.read_bytes()), read_header(good).num_bytes
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, size - 1))
        content[at] = data.draw(st.integers(0, 255))
    frugal(survives, bytes(content))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_numbers_of_the_header_may_be_anything(good: Path, data: st.DataObject) -> None:
    content, size = bytearray(good.read_bytes()), read_header(good).num_bytes
    at = data.draw(st.integers(0, size - 8))
    content[at : at + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1) | st.sampled_from(LARGE)))
    frugal(survives, bytes(content))


LARGE = (2**16, 2**24, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
