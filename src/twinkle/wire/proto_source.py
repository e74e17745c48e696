"""Reads the subset of the proto3 language that the ``.proto`` files beside it use.

Enough for messages, enums, ``oneof``, ``map``, ``repeated`` and ``optional`` in one file without nesting, so that a
schema has a single, readable source and needs no compiler at build or run time. Anything else is a ``ValueError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

_COMMENT = re.compile(r"//[^\n]*")
_BLOCK = re.compile(r"(message|enum)\s+(\w+)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_ONEOF = re.compile(r"oneof\s+(\w+)\s*\{([^{}]*)\}")
_ENUM_VALUE = re.compile(r"(\w+)\s*=\s*(\d+)\s*;")
_FIELD = re.compile(r"(?:(repeated|optional)\s+)?(map\s*<\s*string\s*,\s*\w+\s*>|\w+)\s+(\w+)\s*=\s*(\d+)\s*;")
_MAP_VALUE = re.compile(r"map\s*<\s*string\s*,\s*(\w+)\s*>")

_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "fixed64": FieldDescriptorProto.TYPE_FIXED64,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}


def parse_schema(text: str, *, file_name: str) -> FileDescriptorProto:
    """Turns the text of a schema into the descriptor a ``DescriptorPool`` takes."""
    text = _COMMENT.sub("", text)
    package = re.search(r"package\s+([\w.]+)\s*;", text)
    if package is None or 'syntax = "proto3"' not in text:
        raise ValueError(f"{file_name}: needs a package and proto3 syntax")
    file = FileDescriptorProto(name=file_name, package=package[1], syntax="proto3")
    blocks = list(_BLOCK.finditer(text))
    enums = {name for kind, name, _ in (block.groups() for block in blocks) if kind == "enum"}
    for kind, name, body in (block.groups() for block in blocks):
        if kind == "enum":
            file.enum_type.append(_enum(name, body))
        else:
            file.message_type.append(_message(name, body, package=package[1], enums=enums))
    return file


def _enum(name: str, body: str) -> EnumDescriptorProto:
    enum = EnumDescriptorProto(name=name)
    for value, number in _ENUM_VALUE.findall(body):
        enum.value.add(name=value, number=int(number))
    return enum


def _message(name: str, body: str, *, package: str, enums: set[str]) -> DescriptorProto:
    message = DescriptorProto(name=name)
    for oneof, fields in _ONEOF.findall(body):
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=oneof)
        for _, type_name, field, number in _fields(fields, name):
            _add_field(message, field, number, type_name, package, enums).oneof_index = index
    for label, type_name, field, number in _fields(_ONEOF.sub("", body), name):
        value_type = _MAP_VALUE.fullmatch(type_name)
        if value_type is not None:
            entry = message.nested_type.add(name="".join(part.title() for part in field.split("_")) + "Entry")
            entry.options.map_entry = True
            _add_field(entry, "key", 1, "string", package, enums)
            _add_field(entry, "value", 2, value_type[1], package, enums)
            added = _add_field(message, field, number, f"{name}.{entry.name}", package, enums)
            added.label = FieldDescriptorProto.LABEL_REPEATED
            continue
        added = _add_field(message, field, number, type_name, package, enums)
        if label == "repeated":
            added.label = FieldDescriptorProto.LABEL_REPEATED
        elif label == "optional":
            added.proto3_optional = True
            # proto3 presence is a oneof of one field; such oneofs come after the declared ones.
            added.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field}")
    message.field.sort(key=lambda added: added.number)
    return message


def _fields(body: str, message: str) -> Iterator[tuple[str, str, str, int]]:
    """Yields (label, type, name, number), and refuses what it cannot read."""
    rest = _FIELD.sub("", body).strip()
    if rest:
        raise ValueError(f"message {message}: cannot read {rest!r}")
    for label, type_name, field, number in _FIELD.findall(body):
        yield label, type_name, field, int(number)


def _add_field(
    message: DescriptorProto, name: str, number: int, type_name: str, package: str, enums: set[str]
) -> FieldDescriptorProto:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
        return field
    field.type = FieldDescriptorProto.TYPE_ENUM if type_name in enums else FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{package}.{type_name}"
    return field
