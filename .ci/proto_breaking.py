#!/usr/bin/python3
"""No change of proto/ breaks the last recorded version: tests/protos/released holds a listing of each version, one line an element.

Prints one line for each breaking change and ends with status 1. The present protos are compared with the newest listing alone,
because --record compares each listing with the one before it. Additions break nothing. A field or an enum value may go if
its number and its name become `reserved`. Usage:
  .ci/proto_breaking.py                    # the check
  .ci/proto_breaking.py --record VERSION   # writes the listing of a version, with the present protos and kProtocolVersions

A break is recorded only where no version is spoken any more that was spoken with the listing before: the oldest of
kProtocolVersions (common/versions/build_versions.cc) is above that listing's newest, its `protocol`. The listing of a version
that CHANGELOG.md calls "(not released)" may be recorded anew; that of a released version is never written again.
"""

import argparse
import pathlib
import re
import sys

from google.protobuf import descriptor_pb2
from proto_docs import read

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSIONS = "common/versions/build_versions.cc"
HEADER = """\
# The protos of shardd {version}: every element by its full name. `.ci/proto_breaking.py --record {version}` writes this file.
# While CHANGELOG.md calls the version "(not released)", the file may be recorded anew. After the release it never changes.
"""
REMEDIES = {
    "number": "keep the number",
    "type": "reserve this field and add another one",
    "label": "reserve this field and add another one",
    "oneof": "reserve this field and add another one",
    "request": "keep it and add another rpc",
    "response": "keep it and add another rpc",
    "streaming": "keep it and add another rpc",
}

Field = descriptor_pb2.FieldDescriptorProto


# A listing is {(kind, full name): facts}; facts are {key: text}. What is reserved is an element too: `reserved M[6..6]` for
# numbers, both ends included, and `reserved M[state_dir]` for a name.


def field_type(field, maps):
    entry = maps.get(field.type_name)
    if entry:
        return f"map<{field_type(entry.field[0], maps)},{field_type(entry.field[1], maps)}>"
    return field.type_name.lstrip(".") or Field.Type.Name(field.type).removeprefix("TYPE_").lower()


def field_facts(field, message, maps):
    label = Field.Label.Name(field.label).removeprefix("LABEL_").lower()
    if field.type_name in maps:
        label = "map"
    elif label == "optional" and not field.proto3_optional:
        label = "singular"
    in_oneof = field.HasField("oneof_index") and not field.proto3_optional  # else a oneof of protoc's own
    return {
        "number": str(field.number),
        "type": field_type(field, maps),
        "label": label,
        "oneof": message.oneof_decl[field.oneof_index].name if in_oneof else "none",
    }


def reserved(element, name, end_is_in):
    for place in element.reserved_range:
        yield ("reserved", f"{name}[{place.start}..{place.end if end_is_in else place.end - 1}]"), {}
    for text in element.reserved_name:
        yield ("reserved", f"{name}[{text}]"), {}


def enum_lines(enum, name):
    yield ("enum", name), {}
    for value in enum.value:
        yield ("value", f"{name}.{value.name}"), {"number": str(value.number)}
    yield from reserved(enum, name, end_is_in=True)


def message_lines(message, name):
    yield ("message", name), {}
    maps = {f".{name}.{nested.name}": nested for nested in message.nested_type if nested.options.map_entry}
    for field in message.field:
        yield ("field", f"{name}.{field.name}"), field_facts(field, message, maps)
    for enum in message.enum_type:
        yield from enum_lines(enum, f"{name}.{enum.name}")
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from message_lines(nested, f"{name}.{nested.name}")
    yield from reserved(message, name, end_is_in=False)


def service_lines(service, name):
    yield ("service", name), {}
    for method in service.method:
        streams = [side for side in ("client", "server") if getattr(method, f"{side}_streaming")]
        yield (
            ("rpc", f"{name}.{method.name}"),
            {
                "request": method.input_type.lstrip("."),
                "response": method.output_type.lstrip("."),
                "streaming": "+".join(streams) or "none",
            },
        )


def list_protos(folder):
    listing = {}
    for file in read(folder):
        listing["package", file.package] = {}
        for elements, lines in (
            (file.message_type, message_lines),
            (file.enum_type, enum_lines),
            (file.service, service_lines),
        ):
            for element in elements:
                listing.update(lines(element, f"{file.package}.{element.name}"))
    return listing


def write(listing):
    lines = (
        f"{kind} {name} {' '.join(f'{k}={v}' for k, v in facts.items())}" for (kind, name), facts in listing.items()
    )
    return "".join(f"{line.rstrip()}\n" for line in sorted(lines, key=lambda line: line.split()[1::-1]))


def parse(text):
    """(newest of kProtocolVersions, listing) of what `record` has written."""
    listing, protocol = {}, 0
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        kind, name, *facts = line.split()
        if kind == "protocol":
            protocol = int(name)
        else:
            listing[kind, name] = dict(fact.split("=", 1) for fact in facts)
    return protocol, listing


class Names:
    """Of all messages and enums of a listing: which member has which number, and what is reserved. Immutable."""

    def __init__(self, listing):
        self.numbers, self.members, self.ranges, self.texts = {}, set(), {}, set()
        for (kind, name), facts in listing.items():
            if kind in ("field", "value"):
                parent, _, short = name.rpartition(".")
                self.numbers.setdefault((parent, facts["number"]), short)
                self.members.add((parent, short))
            elif kind == "reserved":
                parent, _, what = name.rstrip("]").partition("[")
                if ".." in what:
                    self.ranges.setdefault(parent, []).append(tuple(map(int, what.split(".."))))
                else:
                    self.texts.add((parent, what))

    def free(self, parent, first, last):
        """The first number from `first` to `last`, both included, that is not reserved; None: all are."""
        for begin, end in sorted(self.ranges.get(parent, [])):
            if begin <= first <= end:
                first = end + 1
        return first if first <= last else None


def gone_member(kind, name, want, got_names, listing):
    """Why a field or an enum value that is not there any more breaks something; None: it is reserved."""
    parent, _, short = name.rpartition(".")
    number = want["number"]
    heir = got_names.numbers.get((parent, number))
    if heir and listing[kind, f"{parent}.{heir}"] == want:
        return f"is renamed (got {heir}, want {short}); keep the name"
    if heir:
        return f"is removed and its number {number} has another meaning (got {heir}, want {short}); take a new number"
    missing = []
    if got_names.free(parent, int(number), int(number)) is not None:
        missing.append(f"reserved {number};")
    if (parent, short) not in got_names.texts:
        missing.append(f'reserved "{short}";')
    return f"is removed (got nothing, want `{' '.join(missing)}`); add it to {parent}" if missing else None


def gone_reserved(name, got_names):
    """Why a reserved number or name that is not there any more breaks something; None: another statement has it."""
    parent, _, what = name.rstrip("]").partition("[")
    if ".." not in what:
        if (parent, what) in got_names.members:
            return f"name {what} is used again (got a use, want reserved); take a new name"
        return f"name {what} is free again (got no statement, want reserved); reserve it"
    number = got_names.free(parent, *map(int, what.split("..")))
    if number is None:  # other ranges cover it
        return None
    heir = got_names.numbers.get((parent, str(number)))
    if heir:
        return f"number {number} is used again (got {heir}, want reserved); give {heir} a new number"
    return f"number {number} is free again (got no statement, want reserved); reserve it"


def compare(want, got):
    """One line for each change from listing `want` to `got` that breaks who knows `want`."""
    got_names = Names(got)
    findings = []
    gone = {
        name for (kind, name) in want if kind in ("package", "message", "enum", "service") and (kind, name) not in got
    }

    def said(name):
        """Something around it is gone: that says it all."""
        while "." in name:
            name = name.rpartition(".")[0]
            if name in gone:
                return True
        return False

    for (kind, name), facts in want.items():
        now = got.get((kind, name))
        if said(name.partition("[")[0] + "." if kind == "reserved" else name):
            continue
        if now is not None:
            findings += [
                f"{kind} {name}: {key} changed (got {now[key]}, want {facts[key]}); {REMEDIES[key]}"
                for key in facts
                if now[key] != facts[key]
            ]
            continue
        if kind in ("field", "value"):
            why = gone_member(kind, name, facts, got_names, got)
        elif kind == "reserved":
            why = gone_reserved(name, got_names)
        else:
            why = f"is removed or renamed (got nothing, want the {kind}); keep it"
        if why:
            findings.append(f"{kind} {name}: {why}")
    return findings


def order(version):
    return [int(number) for number in version.split(".")]


def versions(changelog):
    """{version: it is released} of the headings of CHANGELOG.md."""
    return {v: "(not released)" not in rest for v, rest in re.findall(r"^## (\d+(?:\.\d+)*)(.*)$", changelog, re.M)}


def spoken(source):
    """(oldest, newest) of kProtocolVersions."""
    found = re.search(r"kProtocolVersions = \{(\d+), (\d+)\};", source)
    return int(found[1]), int(found[2])


def recorded(folder):
    return sorted((path.stem for path in folder.glob("*.txt")), key=order)


def check(got, folder, released):
    """Findings about the listing `got`; `released`: as `versions`."""
    known = recorded(folder)
    findings = [
        f"version {version}: it is released and has no listing in {folder}; record it"
        for version, out in released.items()
        if out and version not in known
    ]
    if not known:
        return findings + [f"{folder}: no listing to compare with; record one"]
    _, want = parse((folder / f"{known[-1]}.txt").read_text())
    return findings + compare(want, got)


def record(version, got, protocols, folder, released):
    """Writes the listing of `version`, and returns nothing; or says why it may not. `protocols`: oldest and newest."""
    path, known = folder / f"{version}.txt", recorded(folder)
    if version not in released:
        return [f"record {version}: CHANGELOG.md has no such version"]
    if path.exists() and released[version]:
        return [f"record {version}: the version is released and has a listing; record the next one"]
    if known and order(known[-1]) > order(version):
        return [f"record {version}: a later version is recorded (got {known[-1]})"]
    if known:
        before, want = parse((folder / f"{known[-1]}.txt").read_text())
        broken = compare(want, got)
        if broken and protocols[0] <= before:
            return [
                *broken,
                f"record {version}: these break {known[-1]}, which is still spoken (got oldest of kProtocolVersions "
                f"{protocols[0]}, want more than {before}); keep what it knows, or raise that in {VERSIONS}",
            ]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{HEADER.format(version=version)}protocol {protocols[1]}\n{write(got)}")
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="VERSION", help="write the listing of this version")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="of the repository")
    flags = parser.parse_args()
    folder = flags.root / "tests" / "protos" / "released"
    got = list_protos(flags.root / "proto")
    released = versions((flags.root / "CHANGELOG.md").read_text())
    if flags.record:
        findings = record(flags.record, got, spoken((flags.root / VERSIONS).read_text()), folder, released)
    else:
        findings = check(got, folder, released)
    for finding in findings:
        print(f"proto breaking: {finding}")
    print(f"proto breaking: {len(got)} elements, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
