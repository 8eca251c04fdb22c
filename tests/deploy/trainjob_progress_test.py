#!/usr/bin/env python3
"""Progress as Kubeflow's Trainer takes it: a real daemon trains the example, and a server that checks token, path and fields as
the Trainer's does (pkg/statusserver of its release 2.2) takes what is sent. Usage: trainjob_progress_test.py BIN"""

import http.server
import json
import os
import pathlib
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time

SKIPPED = 77
LIMIT_S = 60
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "deploy" / "kubernetes" / "operators" / "trainjob_progress.py"
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/shardd/trainjobs/train/status"
FIELDS = {"progressPercentage": int, "estimatedRemainingSeconds": int, "metrics": list, "lastUpdatedTime": str}


def await_that(what, name):
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < end, f"not within {LIMIT_S} s: {name}"
        time.sleep(0.05)
    return found


class Trainer(http.server.BaseHTTPRequestHandler):
    token, taken, refused, ill = "first", [], 0, 1

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code = 200 if self.headers["Authorization"] == f"Bearer {Trainer.token}" else 403
        if self.path != PATH:
            code = 404
        if Trainer.ill:  # the first one
            code, Trainer.ill = 500, 0
        if code == 200:
            Trainer.taken.append(body)
        else:
            Trainer.refused += 1
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body if code == 200 else {"message": "not now"}).encode())

    def log_message(self, *_):
        pass


def serve(folder):
    pem, key = folder / "tls.pem", folder / "tls.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-subj", "/CN=trainer", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", pem],
        check=True,
        capture_output=True,
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trainer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, pem


def check(status, last_step):
    """The committed step that it says."""
    (status,) = status.values()
    for name, value in status.items():
        assert isinstance(value, FIELDS[name]), f"{name}: {value!r}"
    metrics = {each["name"]: each["value"] for each in status["metrics"]}
    assert all(isinstance(value, str) and value for value in metrics.values()), metrics
    assert 0 <= status["progressPercentage"] <= 100, status
    step = int(metrics["committed_step"])
    assert step > last_step, f"{step} behind {last_step}"
    return step


def run(bin_folder, folder, processes):
    def start(*command, **environment):
        log = (folder / f"{pathlib.Path(command[0]).name}.log").open("w")
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        processes.append(process)
        return process

    server, pem = serve(folder)
    token, address = folder / "token", f"unix:{folder}/shardd.sock"
    token.write_text("first\n")
    start(f"{bin_folder}/shardd", "--devices=cpu:1", f"--listen={address}")
    await_that((folder / "shardd.sock").exists, "the daemon's socket")
    small = ("--layers", "1", "--width", "32", "--heads", "2", "--log_every", "0")
    ranks = {"SHARDD_ADDRESS": address, "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    gpt = start(f"{bin_folder}/gpt", "--steps", "1000000", "--job", "train", *small, **ranks)
    given = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "SHARDD_ADDRESS": address,
        "SHARDD_JOB": "train",
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{server.server_port}{PATH}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(pem),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
    }
    command = (str(SCRIPT), "--steps", "1000000", "--every", "0.2")
    other = start(*command, **given, PET_NODE_RANK="1")
    assert other.wait(LIMIT_S) == 0, "another node says nothing"
    progress = start(*command, **given, PET_NODE_RANK="0")
    await_that(lambda: len(Trainer.taken) >= 2, "two answers behind one that failed")
    assert Trainer.refused == 1
    Trainer.token = "second"
    await_that(lambda: Trainer.refused > 1, "the old token is refused")
    token.write_text("second\n")
    count = len(Trainer.taken)
    await_that(lambda: len(Trainer.taken) > count, "the new token is read")
    gpt.kill()
    subprocess.run([f"{bin_folder}/shardctl", "--address", address, "close", "train"], check=True, capture_output=True)
    assert progress.wait(LIMIT_S) == 0, "it ends with the job"
    step = 0
    for status in Trainer.taken:
        step = check(status, step)
    said = (folder / f"{SCRIPT.name}.log").read_text().splitlines()
    assert len(said) == 2 and "500" in said[0] and "403" in said[1], said
    print(f"{len(Trainer.taken)} statuses, the last of step {step}; 1 passed, 0 failed")


def main():
    bin_folder = pathlib.Path(sys.argv[1]).resolve()
    if shutil.which("openssl") is None:
        print("skipped: no openssl to make a certificate with")
        sys.exit(SKIPPED)
    processes = []
    with tempfile.TemporaryDirectory(prefix="shardd-trainjob-") as folder:
        try:
            run(bin_folder, pathlib.Path(folder), processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
