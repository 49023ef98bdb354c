"""The messages made of the .proto files are those that protoc makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

from penstock.gateway.rpc.schema import PENSTOCK, PROTOS, read_proto, values_of


@pytest.mark.parametrize("name", ["inference.proto", "penstock.proto"])
def test_what_is_read_of_a_file_is_what_protoc_reads(name: str, tmp_path: Path) -> None:
    assert protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={tmp_path}/set", name]) == 0
    (file,) = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    assert read_proto(name) == file


def test_the_values_of_a_message_are_those_that_were_set() -> None:
    message = PENSTOCK.GenerateRequest(prompt="", temperature=0, stop=["a", "b"], messages=[{"role": "user"}])
    assert values_of(message) == {
        "prompt": "",
        "temperature": 0.0,
        "stop": ["a", "b"],
        "messages": [{"role": "user"}],
    }
