#!/usr/bin/env bash
# Builds the position independent objects that libshardd.so needs, into .cache/pic (or $SHARDD_PIC_DIR).
#
# Debian's static gRPC, protobuf and absl archives link into executables, but a few of their files cannot be part of a
# shared library: they address thread local variables (R_X86_64_TPOFF32) or glibc's `stderr` as only executables may.
# Those files, and all of re2, are compiled here with -fPIC from the sources of exactly the installed packages; the
# linker takes them before it looks into the archives. The same tree of absl sources serves the ThreadSanitizer build,
# which must compile absl's mutex itself to see the locks.
#
# Needs no root: source lists live in a temporary folder. Idempotent; returns at once when up to date.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${SHARDD_PIC_DIR:-$root/.cache/pic}
format=2  # raise when the recipe below changes

version_of() { dpkg-query -W -f '${source:Version}' "$1" 2>/dev/null || { echo "pic_archives: package $1 is not installed; run deploy/bootstrap.sh" >&2; exit 1; }; }
absl_version=$(version_of libabsl-dev)
protobuf_version=$(version_of libprotobuf-dev)
re2_version=$(version_of libre2-dev)
stamp="format $format abseil $absl_version protobuf $protobuf_version re2 $re2_version"
if [[ -f $out/stamp && $(<"$out/stamp") == "$stamp" && -f $out/libshardd_pic.a ]]; then
  exit 0
fi

mkdir -p "$out"
exec 9>"$out/lock"
flock 9  # two builds that start together: the second one finds the work done
if [[ -f $out/stamp && $(<"$out/stamp") == "$stamp" && -f $out/libshardd_pic.a ]]; then
  exit 0
fi
echo "pic_archives: building position independent objects ($stamp)"
rm -f "$out/stamp"
work=$(mktemp -d "${TMPDIR:-/tmp}/shardd_pic.XXXXXX")
trap 'rm -rf "$work"' EXIT

# A private view of apt: the machine's own repositories (mirrors included), as source repositories.
mkdir -p "$work"/{parts,lists/partial,cache/archives/partial,src,obj}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
sources() {
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null | sort -u |
    while read -r uri release; do
      printf 'Types: deb-src\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n\n' "$uri" "$release" "$keyring"
    done
}
sources >"$work/parts/shardd.sources"
if [[ ! -s $work/parts/shardd.sources ]]; then
  printf 'Types: deb-src\nURIs: http://deb.debian.org/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: %s\n' "$keyring" \
    >"$work/parts/shardd.sources"
fi
apt=(apt-get -q -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/parts" -o "Dir::State::lists=$work/lists"
  -o "Dir::Cache=$work/cache" -o APT::Sandbox::User= -o Acquire::Languages=none)
"${apt[@]}" update >"$work/apt.log" 2>&1 || { cat "$work/apt.log" >&2; echo "pic_archives: reading the source lists: apt-get update returned an error" >&2; exit 1; }
fetch() {  # package version: unpacked, with Debian's patches, into $work/src/<package>
  (cd "$work/src" && "${apt[@]}" source --only-source --download-only "$1=$2" >>"$work/apt.log" 2>&1 &&
    dpkg-source -q --no-check -x "$1"_*.dsc "$1" >>"$work/apt.log" 2>&1) ||
    { tail -5 "$work/apt.log" >&2; echo "pic_archives: fetch source of $1 $2: not available from the configured repositories; run apt-get update && apt-get upgrade, then again" >&2; exit 1; }
}
fetch abseil "$absl_version"
fetch protobuf "$protobuf_version"
fetch re2 "$re2_version"

cxx=${CXX:-g++}
launcher=$(command -v ccache || true)
flags=(-O2 -g0 -fPIC -std=c++17 -DNDEBUG -DHAVE_PTHREAD=1 -ffunction-sections -fdata-sections -w)
compile() {  # object, then compiler arguments
  local object=$1
  shift
  echo "$launcher $cxx ${flags[*]} $* -o $work/obj/$object.o" >>"$work/commands"
}
for file in base/internal/sysinfo strings/internal/cordz_functions random/internal/pool_urbg \
  container/internal/raw_hash_set strings/internal/str_format/parser; do
  compile "absl_${file//\//_}" -I"$work/src/abseil" -c "$work/src/abseil/absl/$file.cc"
done
for file in arena stubs/common; do
  compile "protobuf_${file//\//_}" -I"$work/src/protobuf/src" -c "$work/src/protobuf/src/google/protobuf/$file.cc"
done
for file in "$work"/src/re2/re2/*.cc "$work"/src/re2/util/{rune,strutil}.cc; do
  compile "re2_$(basename "$file" .cc)" -I"$work/src/re2" -c "$file"
done
xargs -P "$(nproc)" -I{} sh -c '{}' <"$work/commands"

rm -rf "$out/absl_source.new" "$out/absl_source"
mkdir -p "$out/absl_source.new/absl"
cp -r "$work/src/abseil/absl/"{base,synchronization,debugging,time,numeric,strings,memory,meta,utility,container,algorithm,functional,types,hash,profiling,random,status,cleanup} \
  "$out/absl_source.new/absl/"
find "$out/absl_source.new" \( -name '*_test.cc' -o -name '*_benchmark.cc' -o -name 'testdata' \) -prune -exec rm -rf {} +
mv "$out/absl_source.new" "$out/absl_source"
rm -f "$out/libshardd_pic.a"
ar rcs "$out/libshardd_pic.a" "$work"/obj/*.o
echo "$stamp" >"$out/stamp"
echo "pic_archives: done ($(du -h "$out/libshardd_pic.a" | cut -f1))"
