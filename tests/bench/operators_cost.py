#!/usr/bin/env python3
"""What a step of the example costs where operators look: metrics served, a history written, a scrape every two seconds and an
open status page that shows the job, against a daemon with none of it. Both daemons stand beside each other and take turns,
each round in the other order; medians. Wanted: a ratio below 1.01. CPU time is that of trainers, daemon and shardd-metrics;
"added" is what the latter two take more than the daemon alone, as a share of all CPU time of a step. It is the steadiest of
the three, since the trainers' own unevenness, which is larger than all that is asked for here, is not in it.

  operators_cost.py --bin build/release/bin [--ranks 2] [--steps 60] [--rounds 5] [-- flags of gpt]
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import gpt_overhead

SKIPPED = 77
SCRAPE_S = 2
PAGE_S = 1  # as server/metrics/page has it
LIMIT_S = 10


def await_that(what, name):
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        if time.monotonic() > end:
            sys.exit(f"operators_cost.py: {name} did not come within {LIMIT_S} s")
        time.sleep(0.02)
    return found


class Daemon:
    def __init__(self, options, directory, name, *flags):
        self.log = pathlib.Path(directory, f"{name}.log")
        self.socket = f"{directory}/{name}"
        command = [f"{options.bin}/shardd", f"--devices=cpu:{options.ranks}", f"--listen=unix:{self.socket}", *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        await_that(lambda: os.path.exists(self.socket), f"the daemon's socket {self.socket}")

    def port(self):
        return int(
            await_that(
                lambda: re.findall(r"shardd-metrics serves http://127\.0\.0\.1:(\d+)/", self.log.read_text()),
                "shardd-metrics",
            )[0]
        )

    def cpu_s(self):
        """With its shardd-metrics, which says whose end it follows."""
        mark, seconds = f"--ends_with={self.process.pid}".encode(), gpt_overhead.daemon_cpu_s(self.process.pid)
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    seconds += gpt_overhead.daemon_cpu_s(int(path.parent.name))
        return seconds

    def end(self):
        self.process.terminate()
        self.process.wait()


class Looking:
    """Scrapes, and asks what an open page asks, each at its pace. Counts answers, so that a cost of nothing is seen as such."""

    def __init__(self, port, job):
        self.ended = threading.Event()
        self.answers = {"scrape": 0, "page": 0}
        page = f"/status.json?job={job}&uid={os.getuid()}"
        asked = (("scrape", "/metrics", SCRAPE_S), ("page", page, PAGE_S))
        self.threads = [threading.Thread(target=self.ask, args=(port, *each)) for each in asked]

    def ask(self, port, name, path, every_s):
        while not self.ended.is_set():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT_S) as answer:
                self.answers[name] += len(answer.read()) > 0
            self.ended.wait(every_s)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    if not os.access(f"{options.bin}/shardd-metrics", os.X_OK):
        print("skipped: shardd-metrics is not built (prometheus-cpp-dev is missing)")
        sys.exit(SKIPPED)
    directory = tempfile.mkdtemp(prefix="shardd-operators-", dir="/dev/shm")
    history = tempfile.mkdtemp(prefix="shardd-operators-")  # on a disk, as an operator's
    daemons = []
    try:
        plain = Daemon(options, directory, "plain", "--log_level=error")
        daemons.append(plain)
        seen = Daemon(options, directory, "seen", "--metrics_listen=127.0.0.1:0", f"--history_dir={history}/history")
        daemons.append(seen)
        port = seen.port()
        answers = {"scrape": 0, "page": 0}

        def turn(daemon, number):
            # The name is also that of its ranks' files, which runs append to.
            job = f"{'seen' if daemon is seen else 'plain'}{number}"
            env = dict(os.environ, SHARDD_ADDRESS=f"unix:{daemon.socket}", OMP_NUM_THREADS="1")
            looking = Looking(port, job)
            before = daemon.cpu_s()
            with looking if daemon is seen else contextlib.nullcontext():
                step, _, trainers = gpt_overhead.run(options, directory, job, [], env)
            for name, count in looking.answers.items():
                answers[name] += count
            return step, trainers, (daemon.cpu_s() - before) / options.steps

        ratios, cpu_ratios, added = [], [], []
        for number in range(options.rounds):
            order = [plain, seen] if number % 2 == 0 else [seen, plain]
            took = {daemon: turn(daemon, number) for daemon in order}
            ratios.append(took[seen][0] / took[plain][0])
            cpu = {daemon: trainers + own for daemon, (_, trainers, own) in took.items()}
            cpu_ratios.append(cpu[seen] / cpu[plain])
            added.append((took[seen][2] - took[plain][2]) / cpu[plain])
            print(
                f"round {number}: a step {1e3 * took[plain][0]:.1f} ms alone, {1e3 * took[seen][0]:.1f} ms looked at, ratio "
                f"{ratios[-1]:.3f}; CPU {1e3 * cpu[plain]:.1f} and {1e3 * cpu[seen]:.1f} ms, ratio {cpu_ratios[-1]:.3f}, of it "
                f"daemons {1e3 * took[plain][2]:.2f} and {1e3 * took[seen][2]:.2f} ms",
                flush=True,
            )
        if min(answers.values()) < options.rounds or not os.path.getsize(f"{history}/history/history.jsonl"):
            sys.exit(f"operators_cost.py: nobody has looked, or no history was written ({answers})")
        print(
            f"metrics, history, {answers['scrape']} scrapes and {answers['page']} answers to a page, {options.ranks} ranks: ratio "
            f"{statistics.median(ratios):.3f} (spread {min(ratios):.3f} to {max(ratios):.3f}), of CPU time "
            f"{statistics.median(cpu_ratios):.3f}, added {100 * statistics.median(added):+.2f} % (spread {100 * min(added):+.2f} to "
            f"{100 * max(added):+.2f})"
        )
    finally:
        for daemon in daemons:
            daemon.end()
        for folder in (directory, history):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
