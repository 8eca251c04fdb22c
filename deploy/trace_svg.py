#!/usr/bin/env python3
"""Draws a trace of `shardctl trace` as a picture: a row for each thread, a box for each span, colours by what it is.

trace_svg.py trace.json trace.svg [--from-step 12] [--steps 1] [--width 1000]
"""

import argparse
import html
import json
import sys

ROW, GAP, LEFT, TOP, FONT = 18, 3, 190, 26, 11
COLOURS = {
    "unshard": "#2a9d8f",
    "compute": "#a8c5da",
    "reshard": "#577590",
    "reduce": "#e9a23b",
    "submit": "#e76f51",
    "wait": "#d9d9d9",
    "step": "#8d6cab",
    "own": "#f1efe7",
    "work": "#7fb069",
    "parameters": "#c08497",
}


def read(path):
    """The spans by (process, thread), in the order of the file, and the whole steps."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    names = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names[(event["pid"], event["tid"])] = event["args"]["name"]
    rows = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    other = trace["otherData"]
    labelled = [
        (names.get((pid, 0), "?").split(",")[0], names.get((pid, tid), "?"), rows[(pid, tid)])
        for pid, tid in sorted(rows)
    ]
    return labelled, range(other["first_whole_step"], other["last_whole_step"] + 1)


def draw(rows, begin, end, width):
    scale = (width - LEFT - 8) / (end - begin)
    height = TOP + len(rows) * (ROW + GAP) + 22
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{FONT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    x = LEFT
    for name in ("unshard", "compute", "reshard", "submit", "reduce", "wait", "step", "work"):
        out.append(
            f'<rect x="{x}" y="6" width="10" height="10" fill="{COLOURS[name]}"/>'
            f'<text x="{x + 14}" y="15" fill="#333">{name}</text>'
        )
        x += 30 + 7 * len(name)
    for i, (process, thread, spans) in enumerate(rows):
        y = TOP + i * (ROW + GAP)
        out.append(
            f'<text x="4" y="{y + 13}" fill="#333">{html.escape(process)}: {html.escape(thread)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 8}" height="{ROW}" fill="#f7f7f7"/>'
        )
        for span in spans:
            left, right = max(span["ts"], begin), min(span["ts"] + span["dur"], end)
            if right <= left:
                continue
            x, wide = LEFT + (left - begin) * scale, max((right - left) * scale, 0.5)
            title = html.escape(f"{span['name']}: {span['dur']:.1f} us")
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" fill="'
                f'{COLOURS.get(span["cat"], "#cccccc")}" stroke="#ffffff" stroke-width="0.3">'
                f"<title>{title}</title></rect>"
            )
            if wide > 6 * len(span["name"]) + 4:
                out.append(
                    f'<text x="{x + 3:.1f}" y="{y + 13}" fill="#222" pointer-events="none">'
                    f"{html.escape(span['name'])}</text>"
                )
    y = TOP + len(rows) * (ROW + GAP) + 12
    out.append(
        f'<text x="{LEFT}" y="{y}" fill="#333">0</text><text x="{width - 8}" y="{y}" fill="#333" '
        f'text-anchor="end">{(end - begin) / 1000:.1f} ms</text></svg>'
    )
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("svg")
    parser.add_argument("--from-step", type=int, default=0, help="default: the first whole one")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--width", type=int, default=1000)
    options = parser.parse_args()
    rows, whole = read(options.trace)
    if not whole:
        sys.exit(f"trace_svg.py {options.trace}: it has no whole step")
    first = options.from_step or whole[0]
    wanted = {f"step {step}" for step in range(first, first + options.steps)}
    steps = [span for process, thread, spans in rows if thread == "steps" for span in spans if span["name"] in wanted]
    if not steps:
        sys.exit(f"trace_svg.py {options.trace}: no step {first} (it has {whole[0]} to {whole[-1]})")
    begin, end = min(s["ts"] for s in steps), max(s["ts"] + s["dur"] for s in steps)
    with open(options.svg, "w", encoding="utf-8") as file:
        file.write(draw(rows, begin, end, options.width))


if __name__ == "__main__":
    main()
