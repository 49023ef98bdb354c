"""The messages of the .proto files beside this module, made when it is imported: there is no generated code.

The reader knows the part of proto3 that these files need; a test compares what it makes of them with protoc's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PROTOS = Path(__file__).parent / "protos"

_TOKEN = re.compile(r'//[^\n]*|"[^"]*"|[\w.]+|[^\s\w]')


def read_proto(name: str) -> FileDescriptorProto:
    """Returns the descriptor of a .proto file."""
    text = (PROTOS / name).read_text()
    tokens = iter([token for token in _TOKEN.findall(text) if not token.startswith("//")])
    file = FileDescriptorProto(name=name, syntax="proto3")
    for token in tokens:
        if token == "package":
            file.package = next(tokens)
        elif token == "message":
            _read_message(file.message_type.add(name=next(tokens)), tokens, f".{file.package}")
        elif token == "service":
            _read_service(file, tokens)
    _resolve(file)
    return file


def _read_message(message: DescriptorProto, tokens: Iterator[str], scope: str) -> None:
    """Reads a message behind its name."""
    path, oneof, optional = f"{scope}.{message.name}", None, []
    assert next(tokens) == "{"
    for token in tokens:
        if token == "}" and oneof is None:
            break
        if token == "}":
            oneof = None
        elif token == "message":
            _read_message(message.nested_type.add(name=next(tokens)), tokens, path)
        elif token == "oneof":
            oneof = len(message.oneof_decl)
            message.oneof_decl.add(name=next(tokens))
            assert next(tokens) == "{"
        else:
            field = _read_field(message, token, tokens, path)
            if oneof is not None:
                field.oneof_index = oneof
            if token == "optional":
                optional.append(field)
    for field in optional:  # behind all others, each is a oneof of its own
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _read_field(
    message: DescriptorProto, token: str, tokens: Iterator[str], path: str
) -> FieldDescriptorProto:
    label: Any = FieldDescriptorProto.LABEL_OPTIONAL
    kind = token
    if token in ("repeated", "optional"):
        label = FieldDescriptorProto.LABEL_REPEATED if token == "repeated" else label
        kind = next(tokens)
    if kind == "map":
        _, key, _, value, _, name = (next(tokens) for _ in range(6))
        entry_name = f"{''.join(part.capitalize() for part in name.split('_'))}Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for number, (part, of) in enumerate((("key", key), ("value", value)), 1):
            _set_type(entry.field.add(name=part, number=number, label=label, json_name=part), of)
        label, kind = FieldDescriptorProto.LABEL_REPEATED, f"{path}.{entry_name}"
    else:
        name = next(tokens)
    _, number, _ = (next(tokens) for _ in range(3))
    first, *rest = name.split("_")
    json_name = first + "".join(part.capitalize() for part in rest)
    field = message.field.add(name=name, number=int(number), label=label, json_name=json_name)
    _set_type(field, kind)
    return field


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, kind


_SCALARS = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
}


def _read_service(file: FileDescriptorProto, tokens: Iterator[str]) -> None:
    service = file.service.add(name=next(tokens))
    for token in tokens:
        if token == "}":
            return
        if token == "rpc":
            name, _, request, _, _, _, answer = (next(tokens) for _ in range(7))
            streams = answer == "stream"
            answer = next(tokens) if streams else answer
            method = service.method.add(name=name, input_type=request, output_type=answer)
            if streams:
                method.server_streaming = True


def _resolve(file: FileDescriptorProto) -> None:
    """Gives types their full names; messages are named from where they stand, or from the file."""

    def resolve(message: DescriptorProto, scope: str) -> None:
        nested = {of.name for of in message.nested_type}
        for field in message.field:
            if field.type_name and not field.type_name.startswith("."):
                within = scope if field.type_name in nested else f".{file.package}"
                field.type_name = f"{within}.{field.type_name}"
        for of in message.nested_type:
            resolve(of, f"{scope}.{of.name}")

    for message in file.message_type:
        resolve(message, f".{file.package}.{message.name}")
    for service in file.service:
        for method in service.method:
            method.input_type = f".{file.package}.{method.input_type}"
            method.output_type = f".{file.package}.{method.output_type}"


class Schema:
    """The messages and methods of one .proto file.

    They have a pool of their own: the same messages of a client's library may be in the same process.
    """

    def __init__(self, name: str) -> None:
        self.file = read_proto(name)
        pool = DescriptorPool()
        pool.Add(self.file)
        self._pool = pool
        (service,) = self.file.service
        self.service = f"{self.file.package}.{service.name}"
        self.methods = {method.name: method for method in service.method}

    def __getattr__(self, name: str) -> Any:
        """Returns the class of a message."""
        return self.message(f".{self.file.package}.{name}")

    def message(self, full_name: str) -> Any:
        return GetMessageClass(self._pool.FindMessageTypeByName(full_name.removeprefix(".")))


INFERENCE, PENSTOCK = Schema("inference.proto"), Schema("penstock.proto")


def values_of(message: Any) -> dict[str, Any]:
    """Returns the fields of a message that are set, as JSON has them."""

    def plain(value: Any) -> Any:
        if hasattr(value, "ListFields"):
            return values_of(value)
        return list(map(plain, value)) if hasattr(value, "append") else value

    return {field.name: plain(value) for field, value in message.ListFields()}
