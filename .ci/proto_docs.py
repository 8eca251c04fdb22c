#!/usr/bin/python3
"""Every rpc, message field and enum value of proto/ has a comment, before it or behind it on its line.

Names those that have none and ends with status 1. Usage: .ci/proto_docs.py [folder, default proto]
"""

import pathlib
import subprocess
import sys
import tempfile

from google.protobuf import descriptor_pb2

# Field numbers of descriptor.proto: a path of SourceCodeInfo alternates them with indices.
MESSAGES, ENUMS, SERVICES = 4, 5, 6  # of a file
FIELDS, NESTED_MESSAGES, NESTED_ENUMS = 2, 3, 4  # of a message
VALUES, METHODS = 2, 2  # of an enum, of a service


def read(folder):
    """The files below `folder` as protoc understands them, with their comments."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))
    if not files:
        sys.exit(f"read {folder}: no .proto file below it")
    with tempfile.NamedTemporaryFile() as out:
        command = ["protoc", "--include_source_info", f"--descriptor_set_out={out.name}", "-I", str(folder)]
        if subprocess.run(command + files, check=False).returncode:
            sys.exit(f"read {folder}: protoc refuses it, as it says above")
        return descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(out.name).read_bytes()).file


def enum_elements(enum, path, name):
    for i, value in enumerate(enum.value):
        yield path + (VALUES, i), f"{name}.{value.name}"


def message_elements(message, path, name):
    for i, field in enumerate(message.field):
        yield path + (FIELDS, i), f"{name}.{field.name}"
    for i, enum in enumerate(message.enum_type):
        yield from enum_elements(enum, path + (NESTED_ENUMS, i), f"{name}.{enum.name}")
    for i, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:  # protoc's own, for map fields
            yield from message_elements(nested, path + (NESTED_MESSAGES, i), f"{name}.{nested.name}")


def elements(file):
    """(path, name) of everything that must have a comment."""
    for i, message in enumerate(file.message_type):
        yield from message_elements(message, (MESSAGES, i), message.name)
    for i, enum in enumerate(file.enum_type):
        yield from enum_elements(enum, (ENUMS, i), enum.name)
    for i, service in enumerate(file.service):
        for k, method in enumerate(service.method):
            yield (SERVICES, i, METHODS, k), f"{service.name}.{method.name}"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else root / "proto"
    checked = bare = 0
    for file in read(folder):
        places = {tuple(place.path): place for place in file.source_code_info.location}
        for path, name in elements(file):
            place = places[path]
            checked += 1
            if not (place.leading_comments.strip() or place.trailing_comments.strip()):
                bare += 1
                print(f"{folder / file.name}:{place.span[0] + 1}: {name} has no comment")
    print(f"proto docs: {checked} rpcs, fields and enum values, {bare} without a comment")
    return 1 if bare else 0


if __name__ == "__main__":
    sys.exit(main())
