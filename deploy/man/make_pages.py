#!/usr/bin/env python3
"""Manual pages of the programs, from their own --help: what a page says of a flag is what the program says.

Usage: make_pages.py FOLDER_OF_PROGRAMS OUTPUT_FOLDER. Writes shardd.8.gz, shardd-custodian.8.gz, shardd-metrics.8.gz and
shardctl.1.gz, of those programs that are there, and prints their names. Needs nothing but Python. The same input gives
the same bytes.
"""

import gzip
import pathlib
import re
import subprocess
import sys

# What help does not say: the section, and where to go on from there.
PAGES = {
    "shardd": (8, ["shardctl(1)", "shardd-custodian(8)", "shardd-metrics(8)", "systemd(1)"]),
    "shardd-custodian": (8, ["shardd(8)"]),
    "shardd-metrics": (8, ["shardd(8)"]),
    "shardctl": (1, ["shardd(8)"]),
}
# Path, what it is; of programs that have such.
FILES = {
    "shardd": [
        ("/run/shardd/shardd.sock", "the socket of the daemon of all users; its folder's group may connect"),
        ("/etc/default/shardd", "variables of the unit: SHARDD_DEVICES"),
        ("/var/lib/shardd/history", "the history of jobs, where the unit keeps it"),
    ],
    "shardd-custodian": [("/run/shardd-custodian/custody.sock", "its socket, where the unit starts it")],
    "shardctl": [
        ("/run/shardd/shardd.sock", "the daemon of all users"),
        ("$XDG_RUNTIME_DIR/shardd/shardd.sock, /tmp/shardd-UID/shardd.sock", "a user's own daemon"),
    ],
}


def roff(text):
    """`text` as it is, for troff: no macros, no escapes, and a hyphen is a minus sign."""
    text = text.replace("\\", "\\(rs").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in ".'" else line for line in text.split("\n"))


def said(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode or not done.stdout:
        sys.exit(f"make_pages: {' '.join(map(str, command))}: status {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


class Help:
    """What a program's --help says, taken apart: `name: what it is`, `usage: ...`, headings that end with a colon, rows
    of two columns below them, and paragraphs."""

    def __init__(self, text):
        lines = text.rstrip().split("\n")
        self.title = lines[0]
        self.usage = next(line.removeprefix("usage: ") for line in lines if line.startswith("usage: "))
        self.sections = {}  # heading: rows of (tag, text)
        self.paragraphs = []
        rows, within = None, False  # the section's, and whether the line before is of the same paragraph
        for line in lines[1:]:
            if not line or line.startswith("usage: "):
                rows = None
            elif match := re.fullmatch(r"(\w[^:]*?)(?: \((.*)\))?:", line):
                rows = self.sections.setdefault(match[1], [])
                if match[2]:
                    self.paragraphs.append([f"{match[1].capitalize()}: {match[2]}."])
            elif rows is not None and (match := re.fullmatch(r"  (\S.*?)(?:  +(.*))?", line)):
                rows.append([match[1], match[2] or ""])
            elif rows is not None and line.startswith("   ") and rows:
                rows[-1][1] = f"{rows[-1][1]} {line.strip()}".strip()
            else:
                if not within:
                    self.paragraphs.append([])
                self.paragraphs[-1].append(line)
                rows, within = None, True
                continue
            within = False


def rows_of(rows):
    return "".join(f".TP\n.B {roff(tag)}\n{roff(text or 'see above')}\n" for tag, text in rows)


def paragraphs_of(paragraphs):
    return ".PP\n".join(roff("\n".join(lines)) + "\n" for lines in paragraphs)


def commands_of(program, rows, common):
    """A paragraph for each command, with the options that are its own."""
    text = ""
    for name, what in rows:
        if name in ("help", "version"):
            text += f".SS {roff(name)}\n{roff(what)}\n"
            continue
        own = Help(said(program, name, "--help"))
        options = [row for row in own.sections["options"] if row[0] not in common]
        text += f".SS {roff(own.usage.removeprefix(program.name + ' '))}\n{roff(what)}\n"
        rows = own.sections.get("arguments", []) + options
        text += rows_of(rows) + (".PP\n" if rows and own.paragraphs else "") + paragraphs_of(own.paragraphs)
    return text


def page(program):
    section, others = PAGES[program.name]
    version = said(program, "--version").split()[1]
    own = Help(said(program, "--help"))
    name, _, what = own.title.partition(": ")
    if name != program.name or not what:
        sys.exit(f'make_pages: {program} --help: first line (got "{own.title}", want "{program.name}: what it is")')
    text = f'.TH {name.upper()} {section} "" "shardd {version}" "shardd"\n.SH NAME\n{name} \\- {roff(what)}\n'
    text += f".SH SYNOPSIS\n.B {roff(own.usage)}\n"
    if own.paragraphs:
        text += ".SH DESCRIPTION\n" + paragraphs_of(own.paragraphs)
    for heading, rows in own.sections.items():
        text += f".SH {roff('OPTIONS' if heading == 'flags' else heading.upper())}\n"
        if heading == "commands":
            common = {tag for tag, _ in own.sections["options"]}
            text += commands_of(program, rows, common)
        else:
            text += rows_of(rows)
    if files := FILES.get(name):
        text += ".SH FILES\n" + rows_of(files)
    refer = [f".BR {roff(other.partition('(')[0])} ({other.partition('(')[2]}" for other in others]
    return text + ".SH SEE ALSO\n" + " ,\n".join(refer) + "\n"


def main():
    programs, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for name, (section, _) in PAGES.items():
        if (programs / name).exists():
            made = out / f"{name}.{section}.gz"
            made.write_bytes(gzip.compress(page(programs / name).encode(), mtime=0))
            print(made.name)


if __name__ == "__main__":
    main()
