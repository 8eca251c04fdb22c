#!/usr/bin/env python3
"""The status page in a headless Chromium: with a daemon and trainers that it shows, and with a recorded answer.

Usage: tests/page/page_test.py <folder of the programs> [unittest arguments]
Status 77, with the reason: a program is missing. SHARDD_PICTURES=<folder>: leaves the documents' pictures there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import Any

from browser import PROGRAMS, Page, browser, program
from run_of_page import Daemon, Served, daemon, recorded

EVIL = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"
programs = Path()


def spoiled(value: Any) -> Any:
    """Every text of an answer, with a stranger's markup in front."""
    if isinstance(value, dict):
        return {name: spoiled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each) for each in value]
    return EVIL + value if isinstance(value, str) else value


class PageTest(unittest.TestCase):
    def setUp(self) -> None:
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.page: Page = self.stack.enter_context(browser())

    def serve(self, status: dict[str, Any]) -> Served:
        served = Served(status)
        self.stack.callback(served.end)
        return served

    def start_daemon(self) -> Daemon:
        return self.stack.enter_context(daemon(programs))

    def wait_for_state(self, text: str) -> None:
        self.page.wait("document.getElementById('state')?.textContent", lambda state: str(state).startswith(text))

    def step(self) -> int:
        return int(self.page.text("#tiles dd") or 0)

    def wait_for_step(self, more_than: int) -> None:
        self.page.wait("Number(document.querySelector('#tiles dd')?.textContent ?? 0)", lambda step: step > more_than)

    def test_it_shows_training_and_a_killed_rank(self) -> None:
        run = self.start_daemon()
        ranks = [run.rank("gpt", rank, 2) for rank in range(2)]
        self.page.open(run.url, height=1240)
        self.wait_for_state("live")
        self.page.wait("document.querySelectorAll('#rank-map rect').length", lambda squares: squares == 2)
        self.wait_for_step(0)
        self.wait_for_step(self.step())
        # Both curves have points, and the ranks of the only job are told without being asked for.
        self.page.wait("document.querySelector('#throughput path.curve').getAttribute('d').includes('L')")
        self.page.wait("document.querySelector('#step-time path').getAttribute('d').includes('L')")
        self.page.wait("document.querySelectorAll('#ranks tbody tr').length", lambda rows: rows == 2)
        self.assertRegex(self.page.text("#memory-now"), r"MiB of .* planned")

        self.assertIsNone(self.page.value("document.querySelector('#rank-map .gone')"))
        killed = time.monotonic()
        ranks[1].send_signal(signal.SIGKILL)
        self.page.wait("document.querySelector('#rank-map .gone')?.dataset.rank", lambda rank: rank == "1")
        print(f"the killed rank is shown after {time.monotonic() - killed:.2f} s; wanted: 2 s")
        self.page.wait("document.getElementById('incidents').textContent", lambda text: "rank 1 is lost" in text)
        self.page.wait("document.getElementById('ranks').textContent", lambda text: "absent" in text)
        self.assertIn("rank_lost", self.page.text("#tiles"))

        run.rank("gpt", 1, 2)
        self.page.wait("document.querySelector('#rank-map .gone') === null")
        self.wait_for_step(self.step())
        self.take_pictures(run)
        self.assertEqual(self.page.complaints, [])

        run.process.send_signal(signal.SIGKILL)
        self.wait_for_state("shardd-metrics does not answer")

    def take_pictures(self, run: Daemon) -> None:
        folder = os.environ.get("SHARDD_PICTURES")
        if not folder:
            return
        run.rank("vit", 0, 1)
        time.sleep(60)  # until curves have something to show
        for scheme in ("light", "dark"):
            self.page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            time.sleep(1.5)
            self.page.picture(Path(folder) / f"status_page_{scheme}.png")

    def test_a_thousand_ranks_are_shown_and_change(self) -> None:
        served = self.serve(recorded(ranks=1000))
        self.page.open(served.url)
        self.page.wait("document.querySelectorAll('#rank-map rect').length", lambda squares: squares == 1000)
        self.page.wait("document.querySelectorAll('#ranks tbody tr').length", lambda rows: rows == 1000)
        job, ranks = served.status["jobs"][0], served.status["selected"]["ranks"]
        before = self.page.call("Performance.getMetrics") if self.page.call("Performance.enable") == {} else {}
        job["rank_states"] = job["rank_states"][:777] + "1" + job["rank_states"][778:]
        ranks[777]["state"], ranks[5]["waits"] = "absent", "rank 777: Step"
        job["step"] = 123456
        self.page.wait("document.querySelector('#rank-map .gone')?.dataset.rank", lambda rank: rank == "777")
        self.page.wait(
            "document.querySelector('#ranks').tBodies[0].rows[777].cells[1].className", lambda name: name == "bad"
        )
        self.assertIn("rank 777: Step", self.page.text("#ranks tbody tr:nth-child(6)"))
        self.assertEqual(self.step(), 123456)
        asked = served.asked
        self.page.wait("true", lambda _: served.asked >= asked + 3)
        after = self.page.call("Performance.getMetrics")
        spent = [
            next(each["value"] for each in metrics["metrics"] if each["name"] == "TaskDuration")
            for metrics in (before, after)
        ]
        print(
            f"1000 ranks: the page's thread is busy for {(spent[1] - spent[0]) / max(1, served.asked - asked + 1) * 1e3:.0f} ms a second"
        )
        self.assertEqual(self.page.complaints, [])

    def test_texts_of_strangers_stay_text(self) -> None:
        status = recorded()
        names = ("jobs", "incidents", "selected", "daemon", "viewer")
        served = self.serve(status | {name: spoiled(status[name]) for name in names})
        served.status["jobs"][0]["rank_states"] = status["jobs"][0]["rank_states"]
        served.status["viewer"]["sees"] = "own"
        served.status["selected"]["job"] = served.status["jobs"][0]["name"]
        self.page.open(served.url)
        self.wait_for_state("live")
        self.page.wait("document.getElementById('ranks').textContent", lambda text: EVIL in text)
        for place in ("jobs", "job-name", "tiles", "ranks", "purposes", "incidents", "devices", "note", "nodes"):
            self.assertIn(EVIL, self.page.text(f"#{place}"), place)
        self.assertIn(EVIL, self.page.value("document.querySelector('#rank-map title').textContent"))
        self.page.value("document.querySelector('#jobs button').click()")
        self.page.wait("new URLSearchParams(location.hash.slice(1)).get('job')", lambda job: str(job).startswith(EVIL))
        self.assertEqual(self.page.value("document.querySelectorAll('img').length"), 0)
        self.assertEqual(self.page.value("document.querySelectorAll('script').length"), 1)
        self.assertEqual(self.page.value("document.title"), "shardd")
        self.assertEqual(self.page.complaints, [])

    def test_the_policy_of_the_server_stops_what_would_be_markup(self) -> None:
        run = self.start_daemon()
        self.page.open(run.url)
        self.wait_for_state("live")
        self.assertEqual(self.page.complaints, [])
        self.page.value(
            "document.body.insertAdjacentHTML('beforeend', '<img src=\"/status.json\" onerror=\"window.broken = true\">')"
        )
        self.page.value(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.broken = true'}))"
        )
        self.page.wait("1", lambda _: sum("Content Security Policy" in each for each in self.page.complaints) >= 2)
        self.assertFalse(self.page.value("window.broken === true"))

    def test_it_is_light_and_dark_as_the_reader_has_it(self) -> None:
        served = self.serve(recorded())
        colours = []
        for dark in (False, True):
            self.page.open(served.url + ("?dark" if dark else ""), dark=dark)
            self.wait_for_state("live")
            colours.append(self.page.value("getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(colours, ["rgb(246, 247, 248)", "rgb(20, 23, 26)"])

    def test_a_silent_daemon_is_named_and_comes_back(self) -> None:
        status = recorded()
        served = self.serve(status)
        self.page.open(served.url)
        self.wait_for_state("live")
        served.status = {"viewer": status["viewer"], "daemon": None, "error": "", "time_unix_ms": 0}
        self.wait_for_state("the daemon does not answer")
        self.assertNotEqual(self.page.text("#job-name"), "", "what was known stays to be read")
        served.status = status
        self.wait_for_state("live")
        self.assertEqual(self.page.complaints, [])


def main() -> int:
    global programs
    programs = Path(sys.argv[1]).resolve()
    missing = [name for name in ("shardd", "shardd-metrics", "gpt") if not os.access(programs / name, os.X_OK)]
    if program() is None:
        print(
            f"tests/page skipped: none of {', '.join(PROGRAMS)} is installed (apt-get install chromium-headless-shell)"
        )
        return 77
    if missing:
        print(
            f"tests/page skipped: {programs}: {', '.join(missing)} not built (shardd-metrics needs prometheus-cpp-dev, gpt torch)"
        )
        return 77
    result = unittest.main(argv=[sys.argv[0], *sys.argv[2:]], exit=False, verbosity=2).result
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed, {len(result.skipped)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
