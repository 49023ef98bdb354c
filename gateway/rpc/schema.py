"""The messages of the .proto files beside this module, made when it is imported: there is no generated code.

The reader knows the part of proto3 that these files need; a test compares what it makes of them with protoc's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PROTOS = Path(__file__).parent / "protos"

_TOKEN = re.compile(r"(?://[^\n]*)|([\w.\"]+|[^\s\w])")
_SCALARS = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}
_LABELS: dict[str, Any] = {
    "optional": FieldDescriptorProto.LABEL_OPTIONAL,
    "repeated": FieldDescriptorProto.LABEL_REPEATED,
}


def read_proto(name: str) -> FileDescriptorProto:
    """Returns the descriptor of a .proto file."""
    tokens = filter(None, _TOKEN.findall((PROTOS / name).read_text(encoding="utf-8")))
    file = FileDescriptorProto(name=name, syntax="proto3")
    for token in tokens:
        if token == "package":
            file.package = next(tokens)
        elif token == "message":
            _read_message(file.message_type.add(name=next(tokens)), tokens)
        elif token == "rpc":  # of the one service that a file has, whose name came before
            method, _, request, _, _, _, reply = islice(tokens, 7)
            streams = reply == "stream" or None
            reply = next(tokens) if streams else reply
            file.service[0].method.add(
                name=method, input_type=request, output_type=reply, server_streaming=streams
            )
        elif token == "service":
            file.service.add(name=next(tokens))
    return file


def _read_message(message: DescriptorProto, tokens: Iterator[str]) -> None:
    """Reads a message behind its name."""
    next(tokens)
    oneof, optional = None, []
    for token in tokens:
        if token == "}" and oneof is None:
            break
        if token == "}":
            oneof = None
        elif token == "message":
            _read_message(message.nested_type.add(name=next(tokens)), tokens)
        elif token == "oneof":
            oneof = len(message.oneof_decl)
            message.oneof_decl.add(name=next(tokens))
            next(tokens)
        else:
            field = _read_field(message, token, tokens)
            if oneof is not None:
                field.oneof_index = oneof
            if token == "optional":
                optional.append(field)
    for field in optional:  # each is the one field of a oneof, and these come last
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _read_field(message: DescriptorProto, token: str, tokens: Iterator[str]) -> FieldDescriptorProto:
    label, kind = _LABELS.get(token, _LABELS["optional"]), next(tokens) if token in _LABELS else token
    if kind == "map":
        _, key, _, value, _, name = islice(tokens, 6)
        label, kind = _LABELS["repeated"], f"{name.title().replace('_', '')}Entry"
        entry = message.nested_type.add(name=kind, options={"map_entry": True})
        for place, (part, of) in enumerate((("key", key), ("value", value)), 1):
            entry.field.add(name=part, number=place, label=_LABELS["optional"], **_type(of))
    else:
        name = next(tokens)
    _, number, _ = islice(tokens, 3)
    return message.field.add(name=name, number=int(number), label=label, **_type(kind))


def _type(kind: str) -> dict[str, Any]:
    """Returns the type of a field; messages are found by their names when the file is whole."""
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    return {"type": FieldDescriptorProto.TYPE_MESSAGE, "type_name": kind}


class Schema:
    """The messages and methods of one .proto file.

    They have a pool of their own: the same messages of a client's library may be in the same process.
    """

    def __init__(self, name: str) -> None:
        pool = DescriptorPool()
        pool.Add(read_proto(name))
        self.file = pool.FindFileByName(name)
        (self.service,) = self.file.services_by_name.values()

    def __getattr__(self, name: str) -> Any:
        """Returns the class of a message."""
        return GetMessageClass(self.file.message_types_by_name[name])


INFERENCE, PENSTOCK = Schema("inference.proto"), Schema("generate.proto")


def values_of(message: Any) -> dict[str, Any]:
    """Returns the fields of a message that are set, as JSON has them."""

    def plain(value: Any) -> Any:
        if hasattr(value, "ListFields"):
            return values_of(value)
        return list(map(plain, value)) if hasattr(value, "append") else value

    return {field.name: plain(value) for field, value in message.ListFields()}
