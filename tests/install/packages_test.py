#!/usr/bin/env python3
"""The Debian packages, as a machine gets them that has nothing else: made, looked at, and installed into a clean root.

The root has what the packages' dependencies need, and theirs, copied from this machine's installed packages, so dpkg checks
the dependencies and no network is needed. There scripts run, programs start, and a daemon by the unit's own command line
answers shardctl and serves metrics. Usage: packages_test.py SOURCE BUILD. Status 77, with the reason, where packages cannot
be made or installed.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

SOURCE, BUILD = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
# For the test itself: a shell, id, sleep and setpriv.
ALSO = ["base-files", "base-passwd", "dash", "coreutils", "util-linux", "libc-bin"]
WANT = {
    "shardd": [
        "usr/bin/shardd",
        "usr/bin/shardd-custodian",
        "usr/bin/shardd-metrics",
        "usr/lib/systemd/system/shardd.service",
        "usr/lib/systemd/system/shardd-custodian.service",
        "usr/lib/systemd/system/shardd-metrics.service",
        "usr/lib/sysusers.d/shardd.conf",
        "usr/lib/tmpfiles.d/shardd.conf",
        "usr/share/man/man8/shardd.8.gz",
        "usr/share/man/man8/shardd-custodian.8.gz",
        "usr/share/man/man8/shardd-metrics.8.gz",
        "usr/share/shardd/systemd/gpu.conf",
        "usr/share/shardd/prometheus/prometheus.yml",
        "usr/share/shardd/prometheus/shardd.rules.yml",
        "usr/share/shardd/grafana/shardd.json",
    ],
    "shardctl": [
        "usr/bin/shardctl",
        "usr/share/man/man1/shardctl.1.gz",
        "usr/share/bash-completion/completions/shardctl",
        "usr/share/zsh/vendor-completions/_shardctl",
    ],
    "libshardd0": ["usr/lib/libshardd.so.0"],
    "libshardd-dev": [
        "usr/lib/libshardd.so",
        "usr/include/shardd/client/c/shardd.h",
        "usr/include/shardd/client/cpp/shardd.h",
        "usr/lib/cmake/shardd/shardd-config.cmake",
        "usr/share/shardd/proto/shardd/v1/jobs.proto",
    ],
}
# In the root: both programs by their units' lines, as the unit's user and with the folders that systemd would make; then
# metrics, as their unit has it: another uid in two groups. Ends when its standard input does.
SCRIPT = """
set -e
for folder in run/shardd run/shardd-custodian var/lib/shardd; do install -d -o shardd -g shardd -m 0750 /$folder; done
as_daemon() { exec setpriv --reuid shardd --regid shardd --clear-groups --no-new-privs "$@"; }
(as_daemon {custodian}) &
(as_daemon {daemon}) &
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  [ -S /run/shardd/shardd.sock ] && break
  sleep 1
done
shardctl status
setpriv --reuid nobody --regid shardd --groups shardd,shardd-view --no-new-privs {metrics} &
cat
"""


def fail(what):
    sys.exit(f"packages_test: {what}")


def skip(why):
    print(f"packages_test skipped: {why}")
    sys.exit(77)


def said(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        fail(f"{' '.join(map(str, command))}: status {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def names_of(depends):
    """For each dependency the packages that do: `a, b (>= 1) | c` is [[a], [b, c]]."""
    for alternatives in re.findall(r"[^,]+", depends):
        yield [re.split(r"[ (:]", name.strip())[0] for name in alternatives.split("|")]


def installed(name):
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Pre-Depends},${Depends}\n", name],
        capture_output=True,
        text=True,
        check=False,
    )
    status, _, depends = done.stdout.partition("\n")[0].partition("\t")
    return depends if status.startswith("ii") else None


def closure(names):
    """These packages and all that they need, of those that are installed here; the first installed of alternatives."""
    found, open_names = {}, list(names)
    while open_names:
        name = open_names.pop()
        if name in found or (depends := installed(name)) is None:
            continue
        found[name] = depends
        open_names += [next((each for each in row if installed(each)), row[0]) for row in names_of(depends)]
    return sorted(found)


def make_root(root, names):
    """A root with the files of these packages, which dpkg there knows as installed."""
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / folder).mkdir(parents=True)
        (root / folder).symlink_to(f"usr/{folder}")
    for folder in ("info", "updates", "triggers"):
        (root / "var/lib/dpkg" / folder).mkdir(parents=True)
    for folder in ("proc", "sys", "dev", "run", "tmp", "etc"):
        (root / folder).mkdir()
    (root / "dev/null").touch()
    skipped = re.compile(r"/usr/share/(doc|man|locale|info|lintian|zoneinfo)(/|$)")
    files = [
        line for line in said("dpkg", "-L", *names).split("\n") if line.startswith("/") and not skipped.match(line)
    ]
    files = [file for file in files if file != "/." and pathlib.Path(file).exists()]
    with tempfile.NamedTemporaryFile("w") as listed:
        listed.write("\n".join(file[1:] for file in files))
        listed.flush()
        packed = subprocess.run(
            ["tar", "-C", "/", "--no-recursion", "-T", listed.name, "-cf", "-"], capture_output=True, check=True
        )
    unpack = ["tar", "-C", str(root), "--keep-directory-symlink", "-xf", "-"]
    subprocess.run(unpack, input=packed.stdout, check=True)
    (root / "var/lib/dpkg/status").write_text(
        "\n".join(said("dpkg-query", "-s", name).strip() + "\n" for name in names) + "\n"
    )
    for name in names:
        for file in pathlib.Path("/var/lib/dpkg/info").glob(f"{name}*.list"):
            shutil.copy(file, root / "var/lib/dpkg/info")
    for name in ("passwd", "group"):  # base-passwd's own script makes these
        shutil.copy(f"/usr/share/base-passwd/{name}.master", root / "etc" / name)
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    said("chroot", root, "/sbin/ldconfig")


def check_libraries(tree, name, depends):
    """What each program and library of a package needs is of a package that it names, or of itself."""
    named = {each for row in names_of(depends) for each in row}
    for file in (file for file in tree.rglob("*") if file.is_file() and not file.is_symlink()):
        if file.read_bytes()[:4] != b"\x7fELF":
            continue
        for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", said("readelf", "-d", file)):
            path = re.search(rf"^\s*{re.escape(needed)} .*=> (\S+)", said("/sbin/ldconfig", "-p"), flags=re.M)
            owners = said("dpkg", "-S", f"*/{needed}") if path else ""
            if not named & {line.split(":")[0] for line in owners.split("\n")}:
                fail(f"{name}: {file.relative_to(tree)} needs {needed}, of no package in Depends: {depends}")


def check_packages(work):
    """Makes the packages and looks at them; their paths by name."""
    command = ["cpack", "-G", "DEB", "--config", BUILD / "CPackConfig.cmake", "-B", work / "made"]
    said(*command, "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip")
    made = {path.name.split("_")[0]: path for path in (work / "made").glob("*.deb")}
    if sorted(made) != sorted(WANT):
        fail(f"other packages than expected (got {sorted(made)}, want {sorted(WANT)})")
    for name, path in made.items():
        tree = work / "trees" / name
        tree.mkdir(parents=True)
        said("dpkg-deb", "-x", path, tree)
        for file in WANT[name]:
            if not (tree / file).exists() and not (tree / file).is_symlink():
                fail(f"{path.name}: lacks {file}")
        if other := [each for each in tree.rglob("*") if each.lstat().st_mode & 0o022 and not each.is_symlink()]:
            fail(f"{path.name}: writable for others: {other}")
        depends = said("dpkg-deb", "-f", path, "Depends").strip()
        check_libraries(tree, name, depends)
        print(f"{path.name}: {path.stat().st_size >> 10} KiB, Depends: {depends}")
    return made


def line_of(root, unit):
    """The command of an installed unit."""
    text = (root / "usr/lib/systemd/system" / unit).read_text().replace("\\\n", "")
    line = re.search(r"^ExecStart=(.*)", text, flags=re.M).group(1)
    return line.replace("${SHARDD_DEVICES}", "cpu:2").replace("$SHARDD_PEERS", "")


def check_root(root, made):
    said("dpkg", f"--root={root}", "--install", *made.values())
    groups = (root / "etc/group").read_text()
    users = (root / "etc/passwd").read_text()
    if "\nshardd:" not in users or "\nshardd:" not in groups or "\nshardd-view:" not in groups:
        fail("postinst made no user shardd, or no groups shardd and shardd-view")
    if enabled := list((root / "etc/systemd/system").rglob("shardd*")):
        fail(f"units are enabled unasked: {enabled}")
    units = ("shardd.service", "shardd-custodian.service", "shardd-metrics.service")
    said("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={root}", *units)
    version = said("dpkg-deb", "-f", made["shardd"], "Version").partition("-")[0]
    for program in ("shardd", "shardd-custodian", "shardd-metrics", "shardctl"):
        if version not in said("chroot", root, f"/usr/bin/{program}", "--version"):
            fail(f"{program} --version: not {version}")
        if f"{program}: " not in said("chroot", root, f"/usr/bin/{program}", "--help"):
            fail(f"{program} --help: says not what it is")
    print(check_running(root))
    said("dpkg", f"--root={root}", "--purge", "shardd")
    if (root / "var/lib/shardd").exists():
        fail("a purge leaves /var/lib/shardd")


def check_running(root):
    """What shardctl says of the daemon."""
    lines = {"daemon": "shardd.service", "custodian": "shardd-custodian.service", "metrics": "shardd-metrics.service"}
    script = SCRIPT
    for name, unit in lines.items():
        script = script.replace(f"{{{name}}}", line_of(root, unit))
    script = script.replace("127.0.0.1:9464", "127.0.0.1:0")  # this machine's own may have that
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
    command += ['mount -t proc proc "$1/proc" && exec chroot "$1" /bin/sh -c "$2"', "sh", root, script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as run:
        heard = ""
        for line in run.stdout:
            heard += line
            if match := re.search(r"serves (http://127\.0\.0\.1:\d+/metrics)", line):
                break
        else:
            fail(f"the daemon, or its metrics, did not come up:\n{heard}")
        with urllib.request.urlopen(match[1], timeout=30) as answer:
            metrics = answer.read().decode()
        run.terminate()
    if "shardd_up 1\n" not in metrics or "shardd_device_up{" not in metrics:
        fail(f"metrics do not come from the daemon: {metrics[:500]}")
    return "\n".join(line for line in heard.split("\n") if not re.match(r"[IWE]\d|.* [IWE] \d+ ", line))


def main():
    for tool in ("cpack", "dpkg-shlibdeps", "dpkg-deb", "readelf"):
        if shutil.which(tool) is None:
            skip(f"no {tool}: packages are made on Debian, with dpkg-dev")
    if not (BUILD / "bin/shardd-metrics").exists() or not (BUILD / "man/shardd.8.gz").exists():
        skip("shardd-metrics or manual pages are not built")
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        made = check_packages(work)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "true"]
        if subprocess.run(namespaces, capture_output=True, check=False).returncode:
            skip("made and looked at, and not installed: namespaces need root")
        if not shutil.which("systemd-sysusers") or not installed("systemd"):
            skip("made and looked at, and not installed: this machine has no systemd to copy")
        needs = [row[0] for path in made.values() for row in names_of(said("dpkg-deb", "-f", path, "Depends"))]
        root = work / "root"
        make_root(root, closure(ALSO + needs))
        check_root(root, made)
    print("packages_test: passed")


if __name__ == "__main__":
    main()
