#!/usr/bin/env python3
"""Tells Kubeflow's Trainer how far a TrainJob is: status.trainerStatus, which `kubectl get trainjob` and its SDK show.

    trainjob_progress.py --steps 10000 [--job train] [--every 10] &      # beside torchrun, in every trainer container

Needs Trainer 2.2 with the feature gate TrainJobStatus, which gives each trainer container a URL, a token and a certificate
(KUBEFLOW_TRAINER_SERVER_*). Where they are not, and on all nodes but the first, it ends at once with status 0, so that one
command serves everywhere. The steps are the daemon's, committed ones (`shardctl top`): a step that was dropped is no progress.
It never disturbs training: what fails is said once and tried again. It ends with the job. Standard library alone.
"""

import argparse
import datetime
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

LIMIT_S = 10
NO_SUCH_JOB = 3  # shardctl's status


def job_of(name):
    """What `shardctl top` says of the job; None: there is no such job, or no answer (which the second value says)."""
    try:
        command = ["shardctl", "top", name, "--once", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            return None, "" if done.returncode == NO_SUCH_JOB else done.stderr.strip()
        return json.loads(done.stdout)["jobs"][0], ""
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
        return None, f"shardctl: {error!r}"


def status_of(job, steps):
    """A v1alpha1 UpdateTrainJobStatusRequest."""
    done = min(job["committed_step"], steps)
    status = {
        "progressPercentage": 100 * done // steps,
        "lastUpdatedTime": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "metrics": [{"name": "committed_step", "value": str(job["committed_step"])}],
    }
    if job["steps_per_second"] > 0:
        left_s = int((steps - done) / job["steps_per_second"])
        status["estimatedRemainingSeconds"] = min(left_s, 2**31 - 1)
        status["metrics"].append({"name": "steps_per_second", "value": f"{job['steps_per_second']:.4g}"})
    if job["goodput"] is not None:
        status["metrics"].append({"name": "goodput", "value": f"{job['goodput']:.4f}"})
    return {"trainerStatus": status}


def send(status):
    """Empty: it was taken. Token and certificate are renewed while a job runs, so both are read each time."""
    try:
        with open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"], encoding="utf-8") as file:
            token = file.read().strip()
        request = urllib.request.Request(
            os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
            data=json.dumps(status).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method="POST",
        )
        trusted = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=trusted):
            return ""
    except urllib.error.HTTPError as error:
        return f"{error} {error.read(500).decode(errors='replace')}".strip()
    except (OSError, KeyError) as error:
        return f"{error!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True, help="of the whole job")
    parser.add_argument("--job", default=os.environ.get("SHARDD_JOB", "train"), help="its name at the daemon")
    parser.add_argument("--every", type=float, default=10, help="seconds")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: want at least 1")
    node = os.environ.get("PET_NODE_RANK", os.environ.get("JOB_COMPLETION_INDEX", "0"))
    if "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ or node != "0":
        return
    was_there, said, sent = False, "", None
    while True:
        job, why = job_of(options.job)
        if job is not None:
            was_there = True
            status = status_of(job, options.steps)
            if job["committed_step"] != sent and not (why := send(status)):
                sent = job["committed_step"]
        elif was_there and not why:
            return  # the job has ended
        if why and why != said:
            print(f"trainjob_progress.py: {why}; training goes on", file=sys.stderr, flush=True)
        said = why
        time.sleep(options.every)


if __name__ == "__main__":
    main()
