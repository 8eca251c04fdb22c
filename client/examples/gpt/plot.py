#!/usr/bin/env python3
"""Draws and compares the JSON lines that the gpt example writes (--out). Python's standard library only.

  plot.py chart RUN...  [--svg FILE] [--label NAME]... [--width N] [--height N]
  plot.py compare RUN... --reference RUN [--tolerance X]      status 1: the losses differ by more
  plot.py recovery RUN... --after TIME                        seconds from TIME to the first step with the replacement
A RUN of several ranks is one file that they share, or FILE,FILE. A step that was run again counts once, as last run.
"""

import argparse
import json
import sys


def load(run):
    """Step -> {rank: line}, and the events in order of time."""
    steps, events = {}, []
    for name in run.split(","):
        with open(name, encoding="utf-8") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # the last line of a process that was killed
                if "step" in line:
                    steps.setdefault(line["step"], {})[line["rank"]] = line
                else:
                    events.append(line)
    return steps, sorted(events, key=lambda event: event["time"])


def losses(run):
    """Step -> mean loss over ranks."""
    steps, _ = load(run)
    return {step: sum(line["loss"] for line in lines.values()) / len(lines) for step, lines in sorted(steps.items())}


def terminal_chart(curves, width, height):
    """Lines of text: one mark per curve and column (the mean of the steps there), linear axes."""
    marks = "*o+x"
    first = min(min(curve) for curve in curves)
    last = max(max(curve) for curve in curves)
    columns = []
    for curve in curves:
        by_column = {}
        for step, value in curve.items():
            by_column.setdefault(round((step - first) / max(last - first, 1) * (width - 1)), []).append(value)
        columns.append({x: sum(values) / len(values) for x, values in by_column.items()})
    points = [value for column in columns for value in column.values()]
    low, high = min(points), max(points)
    rows = [[" "] * width for _ in range(height)]
    for index, column in reversed(list(enumerate(columns))):
        for x, value in column.items():
            rows[round((high - value) / max(high - low, 1e-12) * (height - 1))][x] = marks[index % len(marks)]
    out = []
    for y, row in enumerate(rows):
        label = f"{high - (high - low) * y / (height - 1):7.3f}" if y % 4 == 0 or y == height - 1 else " " * 7
        out.append(f"{label} |{''.join(row)}")
    out.append(" " * 8 + "+" + "-" * width)
    out.append(f"{'':8} step {first}{'':{max(1, width - 12 - len(str(first)) - len(str(last)))}}step {last}")
    return out


def svg_chart(curves, labels, events, width=860, height=420):
    left, right, top, bottom = 60, 20, 20, 45
    colours = ["#1f6fb4", "#d9822b", "#2e8b57", "#8a4fbf"]
    points = [value for curve in curves for value in curve.values()]
    low, high = min(points), max(points)
    first = min(min(curve) for curve in curves)
    last = max(max(curve) for curve in curves)

    def x_of(step):
        return left + (step - first) / max(last - first, 1) * (width - left - right)

    def y_of(value):
        return top + (high - value) / max(high - low, 1e-12) * (height - top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for i in range(6):
        value = low + (high - low) * i / 5
        out.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
        step = first + (last - first) * i / 5
        out.append(f'<text x="{x_of(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step:.0f}</text>')
    out.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">step</text>'
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">loss</text>'
    )
    for event in events:
        x = x_of(event["committed_step"])
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" stroke="#c0392b" '
            f'stroke-dasharray="4 4"/><text x="{x + 4:.1f}" y="{top + 12}" fill="#c0392b">'
            f"rank {event['rank']} {event['event']}</text>"
        )
    for index, (curve, label) in enumerate(zip(curves, labels)):
        path = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in curve.items())
        colour = colours[index % len(colours)]
        style = "" if index == 0 else ' stroke-dasharray="6 3"'
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>'
            f'<text x="{width - right - 8}" y="{top + 16 + 16 * index}" text-anchor="end" '
            f'fill="{colour}">{label}</text>'
        )
    out.append("</svg>")
    return "\n".join(out) + "\n"


def chart(options):
    curves = [losses(run) for run in options.runs]
    if not all(curves):
        sys.exit("plot.py: chart: a run has no steps")
    labels = (options.label + options.runs)[: len(curves)] if options.label else options.runs
    print("\n".join(terminal_chart(curves, options.width, options.height)))
    if options.svg:
        _, events = load(options.runs[0])
        shown = [event for event in events if event["event"] == "reattached"]
        with open(options.svg, "w", encoding="utf-8") as file:
            file.write(svg_chart(curves, labels, shown))


def compare(options):
    """Per step and rank: a rank that was killed has not told the loss of a step that was committed without it."""
    want, _ = load(options.reference)
    got, _ = load(",".join(options.runs))
    if not got or set(got) != set(want):
        print(f"steps differ (got {len(got)}, want {len(want)})")
        return 1
    worst, at = -1.0, 0
    for step, lines in got.items():
        for rank, line in lines.items():
            reference = want[step][rank]["loss"]
            difference = abs(line["loss"] - reference) / abs(reference)
            if not difference <= worst:
                worst, at = difference, step
    last = max(got)
    equal = worst <= options.tolerance
    print(
        f"{len(got)} steps: losses {'equal within rounding' if equal else 'NOT EQUAL'}; largest relative difference "
        f"{worst:.2e} (step {at}, bound {options.tolerance:.0e}); last loss {got[last][0]['loss']:.6f} sharded, "
        f"{want[last][0]['loss']:.6f} unsharded"
    )
    return 0 if equal else 1


def recovery(options):
    """A step that was on its way at the time may still be committed; what counts is the first with the replacement."""
    steps, events = load(",".join(options.runs))
    back = [event["time"] for event in events if event["event"] == "attached" and event["time"] > options.after]
    times = [line["time"] for lines in steps.values() for line in lines.values() if back and line["time"] > back[0]]
    if not times:
        print("no step was committed after that")
        return 1
    print(f"{min(times) - options.after:.2f}")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["chart", "compare", "recovery"])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--svg")
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--width", type=int, default=72)
    parser.add_argument("--height", type=int, default=17)
    parser.add_argument("--reference")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--after", type=float)
    options = parser.parse_args()
    return {"chart": chart, "compare": compare, "recovery": recovery}[options.verb](options) or 0


if __name__ == "__main__":
    sys.exit(main())
