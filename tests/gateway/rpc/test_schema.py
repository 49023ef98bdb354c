"""The messages made of the .proto files are those that protoc makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from penstock.gateway.rpc.schema import INFERENCE, PENSTOCK, PROTOS, Schema, values_of


def without_json_names(messages: Iterable[Any]) -> None:
    """Clears what follows from the names of fields."""
    for message in messages:
        without_json_names(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")


@pytest.mark.parametrize("schema", [INFERENCE, PENSTOCK], ids=["inference", "penstock"])
def test_what_is_read_of_a_file_is_what_protoc_reads(schema: Schema, tmp_path: Path) -> None:
    name = schema.file.name
    assert protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={tmp_path}/set", name]) == 0
    (expected,) = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    made = FileDescriptorProto()
    schema.file.CopyToProto(made)
    for file in (expected, made):
        without_json_names(file.message_type)
    assert made == expected


def test_the_values_of_a_message_are_those_that_were_set() -> None:
    message = PENSTOCK.GenerateRequest(prompt="", temperature=0, stop=["a", "b"], messages=[{"role": "user"}])
    assert values_of(message) == {
        "prompt": "",
        "temperature": 0.0,
        "stop": ["a", "b"],
        "messages": [{"role": "user"}],
    }
