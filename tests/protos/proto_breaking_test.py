#!/usr/bin/python3
"""`.ci/proto_breaking.py` names each kind of breaking change and no addition. Last line: `N passed, N failed`.

A case edits BASE, whose listing is the recorded one, and expects exactly these findings. Needs protoc and Debian's python3-protobuf.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / ".ci" / "proto_breaking.py"
sys.path.insert(0, str(SCRIPT.parent))

import proto_breaking  # noqa: E402

BASE = """
syntax = "proto3";
package test.v1;
enum Color {
  COLOR_UNSPECIFIED = 0;
  COLOR_RED = 1;
  COLOR_BLUE = 2;
  reserved 7, 10 to 20;
  reserved "COLOR_OLD";
}
message Car {
  message Wheel { int32 inches = 1; }
  reserved 6, 30 to 40;
  reserved "door";
  string name = 1;
  optional int32 seats = 2;
  repeated Wheel wheels = 3;
  map<string, Color> paint = 4;
  oneof drive {
    int32 electric = 8;
    int32 diesel = 9;
  }
}
message Truck { Car car = 1; }
service Garage {
  rpc Park(Car) returns (Truck);
  rpc Watch(Car) returns (stream Truck);
}
"""
NONE = []
ANOTHER = "reserve this field and add another one"

# (claim, [(text of BASE that occurs once, what replaces it)...], findings)
CASES = [
    # Additions, and what is given up in order.
    ("a new field", [("string name = 1;", "string name = 1; string owner = 5;")], NONE),
    ("a new member of a oneof", [("int32 diesel = 9;", "int32 diesel = 9; int32 steam = 11;")], NONE),
    ("a new enum value", [("COLOR_BLUE = 2;", "COLOR_BLUE = 2; COLOR_GREEN = 3;")], NONE),
    ("a new message", [("message Truck", "message Bike { int32 gears = 1; } message Truck")], NONE),
    ("a new rpc", [("rpc Park", "rpc Leave(Car) returns (Car); rpc Park")], NONE),
    ("a new service", [("service Garage", "service Shop { rpc Buy(Car) returns (Car); } service Garage")], NONE),
    ("a new reservation", [("reserved 6,", "reserved 6, 50,")], NONE),
    ("a wider reservation", [("30 to 40;", "25 to 35, 36 to max;")], NONE),
    ("a field is removed and reserved", [("string name = 1;", 'reserved 1; reserved "name";')], NONE),
    ("a value is removed and reserved", [("COLOR_BLUE = 2;", 'reserved 2; reserved "COLOR_BLUE";')], NONE),
    # Fields.
    (
        "a field is removed",
        [("string name = 1;", "")],
        [
            'field test.v1.Car.name: is removed (got nothing, want `reserved 1; reserved "name";`); add it to test.v1.Car'
        ],
    ),
    (
        "a field is removed without its name",
        [("string name = 1;", "reserved 1;")],
        ['field test.v1.Car.name: is removed (got nothing, want `reserved "name";`); add it to test.v1.Car'],
    ),
    (
        "a field is removed without its number",
        [("string name = 1;", 'reserved "name";')],
        ["field test.v1.Car.name: is removed (got nothing, want `reserved 1;`); add it to test.v1.Car"],
    ),
    (
        "a field of a nested message is removed",
        [("int32 inches = 1;", "")],
        [
            'field test.v1.Car.Wheel.inches: is removed (got nothing, want `reserved 1; reserved "inches";`); '
            "add it to test.v1.Car.Wheel"
        ],
    ),
    (
        "a field is renamed",
        [("string name = 1;", "string title = 1;")],
        ["field test.v1.Car.name: is renamed (got title, want name); keep the name"],
    ),
    (
        "a number has another meaning",
        [("string name = 1;", "bytes title = 1;")],
        [
            "field test.v1.Car.name: is removed and its number 1 has another meaning (got title, want name); take a new number"
        ],
    ),
    (
        "a number is changed",
        [("string name = 1;", "string name = 5;")],
        ["field test.v1.Car.name: number changed (got 5, want 1); keep the number"],
    ),
    (
        "two numbers are exchanged",
        [("electric = 8;", "electric = 9;"), ("diesel = 9;", "diesel = 8;")],
        [
            "field test.v1.Car.diesel: number changed (got 8, want 9); keep the number",
            "field test.v1.Car.electric: number changed (got 9, want 8); keep the number",
        ],
    ),
    (
        "a scalar type is changed",
        [("string name = 1;", "bytes name = 1;")],
        [f"field test.v1.Car.name: type changed (got bytes, want string); {ANOTHER}"],
    ),
    (
        "a message type is changed",
        [("Car car = 1;", "Truck car = 1;")],
        [f"field test.v1.Truck.car: type changed (got test.v1.Truck, want test.v1.Car); {ANOTHER}"],
    ),
    (
        "the type of a map's values is changed",
        [("map<string, Color>", "map<string, Truck>")],
        [
            f"field test.v1.Car.paint: type changed (got map<string,test.v1.Truck>, want map<string,test.v1.Color>); {ANOTHER}"
        ],
    ),
    (
        "a field becomes repeated",
        [("string name = 1;", "repeated string name = 1;")],
        [f"field test.v1.Car.name: label changed (got repeated, want singular); {ANOTHER}"],
    ),
    (
        "a field loses its presence",
        [("optional int32 seats", "int32 seats")],
        [f"field test.v1.Car.seats: label changed (got singular, want optional); {ANOTHER}"],
    ),
    (
        "a field moves into a oneof",
        [("string name = 1;", ""), ("int32 diesel = 9;", "int32 diesel = 9; string name = 1;")],
        [f"field test.v1.Car.name: oneof changed (got drive, want none); {ANOTHER}"],
    ),
    (
        "a field moves out of a oneof",
        [("int32 diesel = 9;", ""), ("string name = 1;", "string name = 1; int32 diesel = 9;")],
        [f"field test.v1.Car.diesel: oneof changed (got none, want drive); {ANOTHER}"],
    ),
    # Enums.
    (
        "a value is removed",
        [("COLOR_BLUE = 2;", "")],
        [
            'value test.v1.Color.COLOR_BLUE: is removed (got nothing, want `reserved 2; reserved "COLOR_BLUE";`); '
            "add it to test.v1.Color"
        ],
    ),
    (
        "a value is renumbered",
        [("COLOR_BLUE = 2;", "COLOR_BLUE = 3;")],
        ["value test.v1.Color.COLOR_BLUE: number changed (got 3, want 2); keep the number"],
    ),
    (
        "a value is renamed",
        [("COLOR_BLUE = 2;", "COLOR_NAVY = 2;")],
        ["value test.v1.Color.COLOR_BLUE: is renamed (got COLOR_NAVY, want COLOR_BLUE); keep the name"],
    ),
    # What was reserved.
    (
        "a reserved number is used again",
        [("reserved 6, 30", "string plate = 6; reserved 30")],
        ["reserved test.v1.Car[6..6]: number 6 is used again (got plate, want reserved); give plate a new number"],
    ),
    (
        "a number of a reserved range is used again",
        [("30 to 40;", "30 to 34, 36 to 40; string plate = 35;")],
        ["reserved test.v1.Car[30..40]: number 35 is used again (got plate, want reserved); give plate a new number"],
    ),
    (
        "a reserved number is free again",
        [("reserved 6, 30", "reserved 30")],
        ["reserved test.v1.Car[6..6]: number 6 is free again (got no statement, want reserved); reserve it"],
    ),
    (
        "a reserved name is used again",
        [('reserved "door";', "int32 door = 5;")],
        ["reserved test.v1.Car[door]: name door is used again (got a use, want reserved); take a new name"],
    ),
    (
        "a reserved name is free again",
        [('reserved "door";', "")],
        ["reserved test.v1.Car[door]: name door is free again (got no statement, want reserved); reserve it"],
    ),
    (
        "an enum's reserved number is used again",
        [("10 to 20;", "10 to 19; COLOR_PINK = 20;")],
        [
            "reserved test.v1.Color[10..20]: number 20 is used again (got COLOR_PINK, want reserved); "
            "give COLOR_PINK a new number"
        ],
    ),
    (
        "an enum's reserved name is used again",
        [('reserved "COLOR_OLD";', "COLOR_OLD = 5;")],
        ["reserved test.v1.Color[COLOR_OLD]: name COLOR_OLD is used again (got a use, want reserved); take a new name"],
    ),
    # Services.
    (
        "an rpc is removed",
        [("rpc Park(Car) returns (Truck);", "")],
        ["rpc test.v1.Garage.Park: is removed or renamed (got nothing, want the rpc); keep it"],
    ),
    (
        "a request type is changed",
        [("rpc Park(Car)", "rpc Park(Truck)")],
        ["rpc test.v1.Garage.Park: request changed (got test.v1.Truck, want test.v1.Car); keep it and add another rpc"],
    ),
    (
        "a response type is changed",
        [("rpc Park(Car) returns (Truck);", "rpc Park(Car) returns (Car);")],
        [
            "rpc test.v1.Garage.Park: response changed (got test.v1.Car, want test.v1.Truck); keep it and add another rpc"
        ],
    ),
    (
        "a client begins to stream",
        [("rpc Park(Car)", "rpc Park(stream Car)")],
        ["rpc test.v1.Garage.Park: streaming changed (got client, want none); keep it and add another rpc"],
    ),
    (
        "a server streams no longer",
        [("(stream Truck)", "(Truck)")],
        ["rpc test.v1.Garage.Watch: streaming changed (got none, want server); keep it and add another rpc"],
    ),
    (
        "a service is renamed",
        [("service Garage", "service Depot")],
        ["service test.v1.Garage: is removed or renamed (got nothing, want the service); keep it"],
    ),
    # Whole names: what lies inside is not named again.
    (
        "a nested message is renamed",
        [("message Wheel", "message Tyre"), ("repeated Wheel", "repeated Tyre")],
        [
            f"field test.v1.Car.wheels: type changed (got test.v1.Car.Tyre, want test.v1.Car.Wheel); {ANOTHER}",
            "message test.v1.Car.Wheel: is removed or renamed (got nothing, want the message); keep it",
        ],
    ),
    (
        "an enum is renamed",
        [("enum Color", "enum Paint"), ("map<string, Color>", "map<string, Paint>")],
        [
            "enum test.v1.Color: is removed or renamed (got nothing, want the enum); keep it",
            f"field test.v1.Car.paint: type changed (got map<string,test.v1.Paint>, want map<string,test.v1.Color>); {ANOTHER}",
        ],
    ),
    (
        "the package is renamed",
        [("package test.v1;", "package test.v2;")],
        ["package test.v1: is removed or renamed (got nothing, want the package); keep it"],
    ),
]


def tree(folder, text, *, protocol=(1, 1), changelog="## 0.1.0 (not released)\n"):
    """A repository with these protos, as `.ci/proto_breaking.py --root` reads it."""
    for name, content in (
        ("proto/test.proto", text),
        (proto_breaking.VERSIONS, "const VersionRange kProtocolVersions = {{{}, {}}};\n".format(*protocol)),
        ("CHANGELOG.md", changelog),
    ):
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return pathlib.Path(folder)


def edited(edits):
    text = BASE
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def listing(text):
    """Of these protos, as it is after it was written and parsed."""
    with tempfile.TemporaryDirectory() as folder:
        made = proto_breaking.list_protos(tree(folder, text) / "proto")
    _, parsed = proto_breaking.parse("# a comment\nprotocol 3\n" + proto_breaking.write(made))
    assert parsed == made, f"the text says something else (got {parsed}, want {made})"
    return parsed


def equal(got, want):
    assert got == want, f"(got {got}, want {want})"


def run(root, *arguments):
    """Status, and the findings."""
    done = subprocess.run([str(SCRIPT), f"--root={root}", *arguments], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    *findings, _ = done.stdout.splitlines()
    return done.returncode, [line.removeprefix("proto breaking: ") for line in findings]


def change(edits, findings):
    base, got = listing(BASE), listing(edited(edits))
    assert got != base, "the edit changes nothing"
    equal(sorted(proto_breaking.compare(base, got)), findings)


def every_line_counts():
    """Whichever element is gone, and whichever fact of it is another, some finding names it."""
    base = listing(BASE)
    for element, facts in base.items():
        less = {other: known for other, known in base.items() if other != element}
        named = [
            finding for finding in proto_breaking.compare(base, less) if finding.startswith(" ".join(element) + ":")
        ]
        assert named, f"{element}: nobody misses it"
        for key in facts:
            findings = proto_breaking.compare(base, {**base, element: {**facts, key: "77"}})
            equal([finding.partition(" changed")[0] for finding in findings], [f"{' '.join(element)}: {key}"])


def every_kind_is_tried():
    """The cases find something about each kind of element, and each fact."""
    found = " ".join(finding for *_, findings in CASES for finding in findings)
    for kind, facts in {(kind, tuple(facts)) for (kind, _), facts in listing(BASE).items()}:
        for fact in facts or ["is"]:
            assert re.search(rf"\b{kind} \S+: .*?\b{fact}\b", found), f"{kind}: no case changes {fact}"


def the_command_fails_on_a_break():
    with tempfile.TemporaryDirectory() as folder:
        root = tree(folder, BASE)
        status, findings = run(root)
        equal((status, len(findings), "no listing" in findings[0]), (1, 1, True))
        equal(run(root, "--record=0.1.0"), (0, []))
        equal(run(root), (0, []))
        tree(folder, edited([("string name = 1;", "string name = 1; string owner = 5;")]))
        equal(run(root), (0, []))
        tree(folder, edited([("COLOR_BLUE = 2;", "COLOR_BLUE = 3;")]))
        equal(run(root), (1, ["value test.v1.Color.COLOR_BLUE: number changed (got 3, want 2); keep the number"]))


def a_break_is_recorded_with_a_new_protocol_only():
    broken = edited([("string name = 1;", "string name = 5;")])
    with tempfile.TemporaryDirectory() as folder:
        root = tree(folder, BASE)
        equal(run(root, "--record=0.1.0"), (0, []))
        before = (root / "tests/protos/released/0.1.0.txt").read_text()
        status, findings = run(tree(folder, broken), "--record=0.1.0")
        equal((status, len(findings)), (1, 2))
        assert "want more than 1" in findings[1], findings
        status, findings = run(tree(folder, broken, protocol=(1, 2)), "--record=0.1.0")  # it is still spoken
        equal((status, len(findings)), (1, 2))
        equal((root / "tests/protos/released/0.1.0.txt").read_text(), before)
        equal(run(tree(folder, broken, protocol=(2, 3)), "--record=0.1.0"), (0, []))
        equal(run(root), (0, []))
        equal(run(tree(folder, BASE, protocol=(2, 4)))[0], 1)
        status, findings = run(tree(folder, BASE, protocol=(3, 4)), "--record=0.1.0")
        assert "want more than 3" in findings[-1], findings


def a_released_listing_stays_and_is_required():
    both = "## 0.10.0 (not released)\n## 0.9.0\n## 0.8.0 (not released)\n"
    with tempfile.TemporaryDirectory() as folder:
        root = tree(folder, BASE, changelog=both)
        status, findings = run(root)
        equal((status, len(findings)), (1, 2))
        assert findings[0].startswith("version 0.9.0: it is released and has no listing"), findings
        equal(run(root, "--record=0.9.0"), (0, []))
        equal(run(root), (0, []))
        status, findings = run(root, "--record=0.9.0")
        equal((status, findings), (1, ["record 0.9.0: the version is released and has a listing; record the next one"]))
        equal(run(root, "--record=0.11.0"), (1, ["record 0.11.0: CHANGELOG.md has no such version"]))
        # The newest by number, not by text, is what counts.
        text = edited([("string name = 1;", "string name = 5;")])
        equal(run(tree(folder, text, protocol=(2, 2), changelog=both), "--record=0.10.0"), (0, []))
        equal(run(root), (0, []))
        equal(run(root, "--record=0.8.0"), (1, ["record 0.8.0: a later version is recorded (got 0.10.0)"]))


def main():
    cases = [
        (claim, lambda edits=edits, findings=findings: change(edits, findings)) for claim, edits, findings in CASES
    ]
    for case in (
        every_line_counts,
        every_kind_is_tried,
        the_command_fails_on_a_break,
        a_break_is_recorded_with_a_new_protocol_only,
        a_released_listing_stays_and_is_required,
    ):
        cases.append((case.__name__.replace("_", " "), case))
    failed = 0
    for claim, case in cases:
        try:
            case()
        except AssertionError as error:
            failed += 1
            print(f"proto breaking test: {claim}: {error}")
    print(f"{len(cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
