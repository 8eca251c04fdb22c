#!/usr/bin/env python3
"""Draws and compares the JSON lines that the gpt example writes (--out). Python's standard library only.

  plot.py chart RUN...  [--svg FILE] [--label NAME]... [--width N] [--height N]
  plot.py compare RUN... --reference RUN [--tolerance X]      status 1: the losses differ by more
  plot.py progress RUN...                                     the last committed step
  plot.py recovery RUN... --after TIME                        seconds from TIME to the next committed step
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
    """Lines of text: one mark per curve, linear axes."""
    marks = "*o+x"
    points = [value for curve in curves for value in curve.values()]
    low, high = min(points), max(points)
    first = min(min(curve) for curve in curves)
    last = max(max(curve) for curve in curves)
    rows = [[" "] * width for _ in range(height)]
    for index, curve in reversed(list(enumerate(curves))):
        for step, value in curve.items():
            x = round((step - first) / max(last - first, 1) * (width - 1))
            y = round((high - value) / max(high - low, 1e-12) * (height - 1))
            rows[y][x] = marks[index % len(marks)]
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

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
           f'font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for i in range(6):
        value = low + (high - low) * i / 5
        out.append(f'<line x1="{left}" x2="{width - right}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}" stroke="#ddd"/>'
                   f'<text x="{left - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        step = first + (last - first) * i / 5
        out.append(f'<text x="{x_of(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step:.0f}</text>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">step</text>'
               f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">loss</text>')
    for event in events:
        x = x_of(event["committed_step"])
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" stroke="#c0392b" '
                   f'stroke-dasharray="4 4"/><text x="{x + 4:.1f}" y="{top + 12}" fill="#c0392b">'
                   f'rank {event["rank"]} {event["event"]}</text>')
    for index, (curve, label) in enumerate(zip(curves, labels)):
        path = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in curve.items())
        colour = colours[index % len(colours)]
        style = "" if index == 0 else ' stroke-dasharray="6 3"'
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>'
                   f'<text x="{width - right - 8}" y="{top + 16 + 16 * index}" text-anchor="end" '
                   f'fill="{colour}">{label}</text>')
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
    reference = losses(options.reference)
    got = {}
    for run in options.runs:
        got.update(losses(run))
    if not got or set(got) != set(reference):
        print(f"compare: steps differ (got {len(got)}, want {len(reference)})")
        return 1
    worst = max(reference, key=lambda step: abs(got[step] - reference[step]) / abs(reference[step]))
    difference = abs(got[worst] - reference[worst]) / abs(reference[worst])
    last = max(got)
    verdict = "equal within rounding" if difference <= options.tolerance else "NOT EQUAL"
    print(f"{len(got)} steps: losses {verdict}; largest relative difference {difference:.2e} (step {worst}, bound "
          f"{options.tolerance:.0e}); last loss {got[last]:.6f} sharded, {reference[last]:.6f} unsharded")
    return 0 if difference <= options.tolerance else 1


def progress(options):
    steps = set()
    for run in options.runs:
        try:
            steps |= set(load(run)[0])
        except FileNotFoundError:
            pass  # the trainer has not opened it yet
    print(max(steps, default=0))


def recovery(options):
    times = []
    for run in options.runs:
        for lines in load(run)[0].values():
            times += [line["time"] for line in lines.values() if line["time"] > options.after]
    if not times:
        sys.exit("plot.py: recovery: no step was committed after that")
    print(f"{min(times) - options.after:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["chart", "compare", "progress", "recovery"])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--svg")
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--width", type=int, default=72)
    parser.add_argument("--height", type=int, default=17)
    parser.add_argument("--reference")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--after", type=float)
    options = parser.parse_args()
    return {"chart": chart, "compare": compare, "progress": progress, "recovery": recovery}[options.verb](options) or 0


if __name__ == "__main__":
    sys.exit(main())
