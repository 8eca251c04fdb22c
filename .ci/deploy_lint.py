#!/usr/bin/env python3
"""What deploy/ gives to other programs is what they understand: units, image, manifests, and every shell script.

One line per finding. Last line: `N passed, N failed, N skipped`, one per check; a check whose tool or binary is missing
is skipped and says so. Nothing is started and no network is used. Usage: .venv/bin/python .ci/deploy_lint.py
"""

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.34"  # the first with resource.k8s.io/v1
# Tenths, as systemd-analyze scores units: 0 to 100.
MAX_EXPOSURE = {"shardd.service": 13, "shardd-custodian.service": 10, "shardd-metrics.service": 13}
PROGRAMS = ("shardd", "shardd-custodian", "shardd-metrics")
YAMLLINT = "{extends: default, rules: {line-length: {max: 132}, braces: {max-spaces-inside: 0}, comments: {min-spaces-from-content: 1}}}"


class Skip(Exception):
    """The reason."""


def tool(name):
    beside = pathlib.Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise Skip(f"no {name}; deploy/bootstrap.sh installs what PyPI has, apt the rest (promtool: prometheus)")
    return path


def binary(name):
    for preset in ("dev", "release"):
        if (path := ROOT / "build" / preset / "bin" / name).exists():
            return str(path)
    raise Skip(f"{name} is not built")


def run(*command):
    """Status, and what it said on either stream."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def complain(*command):
    status, text = run(*command)
    return [text or f"{command[0]}: status {status}"] if status else []


def units():
    """systemd takes the units without a word, each with the drop-ins; programs that are not here are replaced by one that is."""
    analyze, findings = tool("systemd-analyze"), []
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for unit in [*(DEPLOY / "systemd").glob("*.service"), *(DEPLOY / "systemd").glob("*.mount")]:
            text = re.sub(r"^(Exec(?:Start|Reload)=)/\S+", r"\1/bin/true", unit.read_text(), flags=re.M)
            names.append(f"{folder}/{unit.name}")
            pathlib.Path(names[-1]).write_text(text)
        for unit, most in MAX_EXPOSURE.items():
            status, text = run(analyze, "security", "--offline=true", f"--threshold={most}", f"{folder}/{unit}")
            findings += [f"{unit}: exposure above {most / 10}: {text.splitlines()[-1]}"] if status else []
        daemon = (DEPLOY / "systemd" / "shardd.service").read_text()
        if re.search(r"^ProtectProc=(?!default)", daemon, flags=re.M):
            findings.append("shardd.service: ProtectProc hides launchers, as long as which jobs are kept")
        if not re.search(r"^RuntimeDirectoryPreserve=(restart|yes)$", daemon, flags=re.M):
            findings.append("shardd.service: a restart takes the directory from containers (RuntimeDirectoryPreserve)")
        dropins = pathlib.Path(folder, "shardd.service.d")
        dropins.mkdir()
        for conf in (None, *(DEPLOY / "systemd").glob("*.conf")):
            if conf:
                shutil.copy(conf, dropins)
            status, text = run(analyze, "verify", "--man=no", "--recursive-errors=no", *names)
            findings += [text] if text or status else []
    return findings


def jobs_of_operators():
    """(file name, the Jobs that a JobSet or a training runtime makes) of deploy/kubernetes/operators."""
    try:
        import yaml
    except ImportError:
        raise Skip("no yaml; deploy/bootstrap.sh installs it") from None
    for path in sorted((DEPLOY / "kubernetes" / "operators").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            spec = document["spec"]
            replicated = spec.get("replicatedJobs") or spec.get("template", {}).get("spec", {}).get(
                "replicatedJobs", []
            )
            for job in replicated:
                yield (
                    path.name,
                    {
                        "apiVersion": "batch/v1",
                        "kind": "Job",
                        "metadata": {"name": job["name"]},
                        "spec": job["template"]["spec"],
                    },
                )


def documents():
    """(file name, object) of every manifest."""
    try:
        import yaml
    except ImportError:
        raise Skip("no yaml; deploy/bootstrap.sh installs it") from None
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from ((path.name, document) for document in yaml.safe_load_all(path.read_text()))


def pods():
    """(file name, pod specification) of every manifest that makes pods."""
    for name, document in documents():
        template = document.get("spec", {}).get("template")
        if template:
            yield name, template["spec"]


def containers(pod):
    return pod.get("initContainers", []) + pod["containers"]


def program(container):
    """The program of shardd that the container runs, with its arguments; otherwise an empty list."""
    image = container["image"].rpartition("/")[2].partition(":")[0]
    command = container.get("command", ["shardd"] if image == "shardd" else [])
    name = pathlib.Path(command[0]).name if command else ""
    return [name, *command[1:], *container.get("args", [])] if name in PROGRAMS else []


def socket_of(container, flag):
    """Path of the Unix socket that the flag names; otherwise nothing."""
    prefix = f"--{flag}=unix:"
    paths = [word.removeprefix(prefix) for word in program(container) if word.startswith(prefix)]
    return pathlib.PurePosixPath(paths[-1]) if paths else None


def mounted(container, path):
    """(volume, path in it) where the container finds the path; otherwise nothing."""
    mounts = [mount for mount in container.get("volumeMounts", []) if path.is_relative_to(mount["mountPath"])]
    if not mounts:
        return None
    mount = max(mounts, key=lambda mount: len(mount["mountPath"]))
    return mount["name"], path.relative_to(mount["mountPath"])


def custodian_findings(pod):
    """A daemon with --custodian finds one in its pod, of its uid, at a socket that no other container reaches."""
    daemons = [container for container in containers(pod) if program(container)[:1] == ["shardd"]]
    custodians = [container for container in containers(pod) if program(container)[:1] == ["shardd-custodian"]]
    served = [daemon for daemon in daemons if socket_of(daemon, "custodian")]
    if len(custodians) != len(served) or len(served) > 1:
        return [f"{len(custodians)} custodians and {len(served)} daemons with --custodian (want one of each, or none)"]
    if not served:
        return []
    daemon, custodian, findings = served[0], custodians[0], []
    asked, listens = socket_of(daemon, "custodian"), socket_of(custodian, "listen")
    if asked != listens:
        findings.append(f"the daemon asks at {asked} and the custodian listens at {listens}")
    place = mounted(custodian, listens) if listens else None
    if place is None or place != mounted(daemon, asked):
        findings.append(f"{asked} is not in one volume of daemon and custodian")
    else:
        volume, inside = place
        if "emptyDir" not in next((each for each in pod.get("volumes", []) if each["name"] == volume), {}):
            findings.append(f"volume {volume} of the custodian's socket is no emptyDir: others may reach it")
        if len(inside.parts) < 2:
            findings.append(f"{listens} is in the emptyDir itself, which is writable for all: want a directory in it")
        for other in containers(pod):
            if other not in (daemon, custodian) and volume in {each["name"] for each in other.get("volumeMounts", [])}:
                findings.append(f"container {other['name']} mounts volume {volume} of the custodian's socket")
    of_pod = pod.get("securityContext", {}).get("runAsUser")
    uids = [each.get("securityContext", {}).get("runAsUser", of_pod) for each in (daemon, custodian)]
    if None in uids or uids[0] != uids[1]:
        findings.append(f"the custodian serves only its own uid (daemon {uids[0]}, custodian {uids[1]})")
    if custodian not in pod.get("initContainers", []) or custodian.get("restartPolicy") != "Always":
        findings.append("the custodian is no sidecar, which starts before the daemon and again by itself")
    return findings


def custodians():
    return [f"{name}: {finding}" for name, pod in pods() for finding in custodian_findings(pod)]


def scraped():
    """Prometheus finds each daemon's metrics by the pod's annotation and the container's port; a history has a volume."""
    findings = []
    for name, document in documents():
        template = document.get("spec", {}).get("template")
        for container in containers(template["spec"]) if template else []:
            flags = dict(word.partition("=")[::2] for word in program(container)[1:])
            if port := flags.get("--metrics_listen", "").rpartition(":")[2]:
                marks = template["metadata"].get("annotations", {})
                if marks.get("prometheus.io/scrape") != "true" or marks.get("prometheus.io/port") != port:
                    findings.append(f"{name}: no annotations of Prometheus for port {port}")
                if {"name": "metrics", "containerPort": int(port)} not in container.get("ports", []):
                    findings.append(f"{name}: container {container['name']}: no port `metrics` {port}")
            folder = flags.get("--history_dir")
            if folder and mounted(container, pathlib.PurePosixPath(folder)) is None:
                findings.append(f"{name}: container {container['name']}: {folder} is in no volume")
    return findings


def guarded():
    """Metrics without TLS are for pods of one namespace, by a policy of the same file, which nobody can forget to apply."""
    findings = []
    listed = list(documents())
    for name, document in listed:
        template = document.get("spec", {}).get("template")
        words = [word for each in containers(template["spec"]) for word in program(each)] if template else []
        if "--metrics_insecure" not in words:
            continue
        labels, space = template["metadata"]["labels"].items(), document["metadata"].get("namespace")
        policies = [
            each["spec"]
            for file, each in listed
            if (file, each["kind"], each["metadata"].get("namespace")) == (name, "NetworkPolicy", space)
            and each["spec"]["podSelector"]["matchLabels"].items() <= labels
        ]
        ports = {port["name"] for each in containers(template["spec"]) for port in each.get("ports", [])}
        rules = [rule for policy in policies for rule in policy["ingress"]]
        open_ports = {port["port"] for rule in rules if "from" not in rule for port in rule.get("ports", [])}
        if not policies or any("ports" not in rule for rule in rules) or "metrics" in open_ports:
            findings.append(f"{name}: {document['kind']}: no NetworkPolicy says who may read metrics")
        findings += [f"{name}: no such port: {port}" for port in sorted(open_ports - ports)]
    return findings


def manifests():
    """Kubernetes knows every field (which the schema decides) and every name that is referred to."""
    paths = [str(path) for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))]
    findings = complain(tool("yamllint"), "-d", YAMLLINT, *paths)
    findings += complain(tool("kubernetes-validate"), "--quiet", "--strict", "-k", KUBERNETES, *paths)
    operators = list(jobs_of_operators())
    for name, job in operators:  # what an operator adds of its own has no schema here
        with tempfile.NamedTemporaryFile("w", suffix=f"-{name}") as file:
            json.dump(job, file)
            file.flush()
            findings += complain(tool("kubernetes-validate"), "--quiet", "--strict", "-k", KUBERNETES, file.name)
    others = [str(path) for path in sorted((DEPLOY / "kubernetes" / "operators").glob("*.yaml"))]
    findings += complain(tool("yamllint"), "-d", YAMLLINT, *others)
    for name, pod in [*pods(), *((name, job["spec"]["template"]["spec"]) for name, job in operators)]:
        known = {volume["name"] for volume in pod.get("volumes", [])}
        claims = {claim["name"] for claim in pod.get("resourceClaims", [])}
        for container in containers(pod):
            used = {mount["name"] for mount in container.get("volumeMounts", [])}
            claimed = {claim["name"] for claim in container.get("resources", {}).get("claims", [])}
            if missing := (used - known) | (claimed - claims):
                findings.append(
                    f"{name}: container {container['name']}: no such volume or claim: {', '.join(sorted(missing))}"
                )
    return findings


def chart():
    """The Helm chart makes what daemonset.yaml has, and what Kubernetes knows with other values, too."""
    list(documents())  # or no yaml, and the check is skipped
    from chart import render

    folder, findings = DEPLOY / "helm" / "shardd", []
    want = next(each for name, each in documents() if name == "daemonset.yaml" and each["kind"] == "DaemonSet")
    policy = next(each for name, each in documents() if name == "daemonset.yaml" and each["kind"] == "NetworkPolicy")
    others = {
        "nodeSelector": {"a": "b", "c": "d"},
        "devices": "cuda:all",
        "uid": 1234,
        "extraArgs": ["--finish_step_ms=1000"],
        "metrics": {"enabled": False},
    }
    for values in ({}, others):
        objects, _ = render(folder, values)
        made = next(each for each in objects if each["kind"] == "DaemonSet")
        policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
        if not values and (made != want or policies != [policy]):
            findings.append("with its own values DaemonSet or NetworkPolicy are not those of daemonset.yaml")
        findings += custodian_findings(made["spec"]["template"]["spec"])
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write("\n---\n".join(json.dumps(each) for each in objects))
            file.flush()
            findings += complain(tool("kubernetes-validate"), "--quiet", "--strict", "-k", KUBERNETES, file.name)
        started, *arguments = program(made["spec"]["template"]["spec"]["containers"][0])
        status, text = run(binary(started), *arguments, "--version")
        findings += [f"{started} {' '.join(arguments)}: {text}"] if status else []
    version = re.search(r'kVersion\[\] = "(.*)"', (ROOT / "common" / "version.h").read_text()).group(1)
    if f"\nappVersion: {version}\n" not in (folder / "Chart.yaml").read_text():
        findings.append(f"appVersion is not {version}")
    return findings


def commands():
    """The programs take every line that starts them; shardctl takes every line that asks it (and finds no daemon: status 4)."""
    programs = {name: binary(name) for name in (*PROGRAMS, "shardctl")}
    findings = []
    unit = re.sub(r"\\\n", "", (DEPLOY / "systemd" / "shardd.service").read_text())
    start = re.search(r"^ExecStart=/\S+(.*)", unit, flags=re.M).group(1)
    lines = []
    for conf in (None, *sorted((DEPLOY / "systemd").glob("*.conf"))):
        settings = unit + (re.sub(r"\\\n", "", conf.read_text()) if conf else "")
        environment = dict(re.findall(r'^Environment="?(\w+)=([^"\n]+)', settings, flags=re.M))

        # ${X} is one argument, $X as many as it has words.
        def value(match: re.Match, of: dict = environment) -> str:
            return of[match[1]] if match[1] else of.get(match[2], "")

        given = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, start)
        lines.append((conf.name if conf else "shardd.service", ["shardd", *shlex.split(given.replace("%H", "node"))]))
    for name in ("shardd-custodian.service", "shardd-metrics.service"):
        text = re.sub(r"\\\n", "", (DEPLOY / "systemd" / name).read_text())
        start = re.search(r"^ExecStart=/usr/local/bin/(.*)", text, flags=re.M).group(1)
        lines.append((name, shlex.split(start)))
    image = (DEPLOY / "docker" / "Dockerfile").read_text()
    lines.append(("Dockerfile", ["shardd", *json.loads(re.search(r"^CMD (\[.*)", image, flags=re.M).group(1))]))
    reload = re.search(r"^ExecReload=(.*)", unit, flags=re.M).group(1)
    asks = [("shardd.service", shlex.split(reload))]
    asks += [("Dockerfile", json.loads(re.search(r"^HEALTHCHECK .*CMD (\[.*)", image, flags=re.M).group(1)))]
    for name, pod in pods():
        for container in containers(pod):
            lines += [(name, line)] if (line := program(container)) else []
            asks += [(name, probe["exec"]["command"]) for key, probe in container.items() if key.endswith("Probe")]
    for name, (started, *arguments) in lines:
        status, text = run(programs[started], *arguments, "--version")  # flags are checked first
        findings += [f"{name}: {started} {' '.join(arguments)}: {text}"] if status else []
    for name, (asked, *arguments) in asks:
        status, text = run(programs["shardctl"], *arguments, "--address", "/nonexistent/socket")
        if pathlib.Path(asked).name != "shardctl" or status != 4:
            findings.append(f"{name}: {asked} {' '.join(arguments)}: {text}")
    return findings


def dockerfile():
    return complain(tool("hadolint"), "--no-color", str(DEPLOY / "docker" / "Dockerfile"))


def scripts():
    listed = subprocess.run(
        ["git", "ls-files", "*.sh", "*.bash", ".ci/run", "deploy/debian/p*"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return complain(tool("shellcheck"), "--severity=warning", "--format=gcc", *listed.stdout.split())


def metric_names():
    """Rules and board use no metric that deploy/docs/metrics.md does not list; `shardd_x_bucket` is of histogram `shardd_x`."""
    listed = set(re.findall(r"`(shardd_\w+)`", (DEPLOY / "docs" / "metrics.md").read_text()))
    listed |= {name + end for name in listed for end in ("_bucket", "_sum", "_count")}
    findings = []
    for path in (*sorted((DEPLOY / "prometheus").glob("*.yml")), *sorted((DEPLOY / "grafana").glob("*.json"))):
        unknown = set(re.findall(r"\bshardd_\w+", path.read_text())) - listed
        findings += [f"{path.name}: no such metric: {name}" for name in sorted(unknown)]
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
        if len(set(places)) != len(places) or any(x + w > 24 for x, _, w, _ in places):
            findings.append(f"{path.name}: panels lie upon each other, or beyond the edge")
    return findings


def alerts():
    """promtool takes the scrape configuration and the rules, and the rules pass their tests, each of which fires."""
    folder, findings = DEPLOY / "prometheus", []
    names = set(re.findall(r"alert: (\w+)", (folder / "shardd.rules.yml").read_text()))
    tested = (folder / "shardd.rules_test.yml").read_text()
    fired = set(re.findall(r"alertname: (\w+)(?: #.*)?\n\s+exp_alerts:\n", tested))
    findings += [f"shardd.rules_test.yml: {name} never fires there" for name in sorted(names - fired)]
    explained = set(re.findall(r"^### (Shardd\w+)$", (ROOT / "deploy/docs/runbook.md").read_text(), re.M))
    findings += [
        f"deploy/docs/runbook.md: {name} is an alert or a section, not both" for name in sorted(names ^ explained)
    ]
    queries = re.findall(r"^```promql\n(.*?)^```", (ROOT / "deploy/docs/metrics.md").read_text(), flags=re.M | re.S)
    words = " ".join(tested.split())
    findings += [
        f"metrics.md: no test has this query: {each}" for each in queries if " ".join(each.split()) not in words
    ]
    promtool = tool("promtool")
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as rules:  # what the board asks is taken, too
        panels = json.loads((DEPLOY / "grafana" / "shardd.json").read_text())["panels"]
        asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
        taken = [re.sub(r"\$__rate_interval", "1m", expression) for expression in asked]
        records = [{"record": "board", "labels": {"n": str(n)}, "expr": expr} for n, expr in enumerate(taken)]
        json.dump({"groups": [{"name": "board", "rules": records}]}, rules)
        rules.flush()
        findings += complain(promtool, "check", "rules", rules.name)
    for command in (("check", "config", "prometheus.yml"), ("test", "rules", "shardd.rules_test.yml")):
        findings += complain(promtool, *command[:2], str(folder / command[2]))
    return findings


def collector():
    """A collector of OpenTelemetry scrapes what prometheus.yml does, by a configuration that Prometheus takes."""
    list(documents())  # or no yaml, and the check is skipped
    import yaml

    config = yaml.safe_load((DEPLOY / "prometheus" / "otel-collector.yml").read_text())
    ours = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    scraped = config["receivers"]["prometheus"]["config"]
    findings = []
    if scraped["scrape_configs"][0]["static_configs"] != ours["scrape_configs"][0]["static_configs"]:
        findings.append("otel-collector.yml: it scrapes other targets than prometheus.yml")
    for name, pipeline in config["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            unknown = set(pipeline[kind]) - set(config[kind])
            findings += [f"otel-collector.yml: {name}: no such {kind[:-1]}: {each}" for each in sorted(unknown)]
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        yaml.safe_dump(scraped, file)
        file.flush()
        return findings + complain(tool("promtool"), "check", "config", file.name)


def main():
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for check in (
        units,
        dockerfile,
        manifests,
        custodians,
        scraped,
        guarded,
        chart,
        commands,
        metric_names,
        alerts,
        collector,
        scripts,
    ):
        try:
            findings = check()
        except Skip as reason:
            print(f"{check.__name__}: skipped: {reason}")
            counts["skipped"] += 1
            continue
        for finding in findings:
            print(f"{check.__name__}: {finding}")
        counts["failed" if findings else "passed"] += 1
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts))
    return counts["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
