#!/usr/bin/env bash
# Installs a build into a fresh prefix, looks at what the binaries need and export, and builds and runs a trainer's project
# against it. Usage: install_test.sh <source> <build folder> <c++ compiler>
set -euo pipefail
source=$1 build=$2 cxx=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "install_test: $*"
  exit 1
}
prefix=$work/prefix
cmake --install "$build" --prefix "$prefix" >"$work/install.log" || { cat "$work/install.log"; fail "cmake --install ended with an error"; }
library=$(echo "$prefix"/lib*/libshardd.so "$prefix"/lib*/*/libshardd.so | tr ' ' '\n' | grep -v '\*' | head -1)

# Nothing but glibc, so that the daemon starts on any machine and the library enters any process.
for file in "$prefix/bin/shardd" "$prefix/bin/shardctl" "$library"; do
  [[ -e $file ]] || fail "$file: not installed"
  needed=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
  other=$(grep -vxE 'libc\.so\.6|libm\.so\.6|ld-linux-x86-64\.so\.2' <<<"$needed" || true)
  [[ -z $other ]] || fail "$file: needs more than glibc (got ${other//$'\n'/ })"
  [[ -z $(readelf -d "$file" | grep -E 'RPATH|RUNPATH' || true) ]] || fail "$file: has a run path"
done
# The C ABI and nothing else.
foreign=$(nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^shardd_' || true)
[[ -z $foreign ]] || fail "libshardd.so: exports more than shardd_* (got $(head -3 <<<"$foreign" | tr '\n' ' '))"
# Everything that the header declares.
for symbol in $(grep -oE '\bshardd_[a-z_]+\(' "$source/client/c/shardd.h" | tr -d '(' | sort -u); do
  nm -D --defined-only "$library" | grep -q " T $symbol\$" || fail "libshardd.so: $symbol is declared and not exported"
done

# The protos that shardd.h and the documents refer to, whole: each compiles from there.
for proto in "$source"/proto/shardd/v1/*.proto; do
  [[ -e $prefix/share/shardd/proto/shardd/v1/${proto##*/} ]] || fail "share/shardd/proto/shardd/v1/${proto##*/}: not installed"
done
protoc -I "$prefix/share/shardd/proto" --descriptor_set_out=/dev/null "$prefix"/share/shardd/proto/shardd/v1/*.proto ||
  fail "the installed protos do not compile"
# Help is asked for, so it goes to standard output and the status is 0; a wrong flag's does not.
"$prefix/bin/shardd" --help >"$work/help" || fail "shardd --help ends with status $?"
for flag in $(grep -oPz 'ABSL_FLAG\(\s*[^,]+,\s*\K\w+' "$source/server/main.cc" | tr '\0' ' '); do
  grep -q -- "^  --$flag=" "$work/help" || fail "shardd --help: no --$flag"
done
"$prefix/bin/shardd" --nonsense >"$work/nonsense" 2>&1 && fail "shardd takes a flag that there is not"
"$prefix/bin/shardctl" ranks --help | grep -q -- --handles || fail "shardctl ranks --help: not that command's"
# complete word...: what bash offers for the last one.
complete_words() (
  PATH=$prefix/bin:$PATH && source "$prefix/share/bash-completion/completions/shardctl"
  COMP_WORDS=(shardctl "$@") COMP_CWORD=$#
  _shardctl shardctl "${!#}" "${COMP_WORDS[COMP_CWORD - 1]}" && echo "${COMPREPLY[*]}"
)
[[ $(complete_words st) == "status streams" ]] || fail "completion of commands: $(complete_words st)"
[[ $(complete_words --json ranks --h) == "--help --handles" ]] || fail "completion of options: $(complete_words --json ranks --h)"
[[ $(complete_words --address unix:/none st) == "status streams" ]] || fail "completion behind an option: $(complete_words --address unix:/none st)"
# The same in zsh: what it lists below the line that was typed.
if command -v zsh >/dev/null; then
  for typed in "shardctl st:status +streams" "shardctl --json ranks --h:--handles +--help" "shardctl --address /none st:status +streams"; do
    timeout 60 zsh -f "$source/tests/install/zsh_completion.zsh" "$prefix/bin" "$prefix/share/zsh/vendor-completions" "${typed%:*}" >"$work/zsh" ||
      fail "zsh ended with status $?"
    grep -qE -- "^${typed#*:}" "$work/zsh" || fail "zsh offers something else for ${typed%:*}: $(<"$work/zsh")"
  done
else
  echo "install_test: completion of zsh is not tried: no zsh"
fi
# Manual pages: every flag, and nothing that the tools warn of (there is no date: the same program makes the same page).
for page in man8/shardd.8 man8/shardd-custodian.8 man1/shardctl.1; do
  [[ -e $prefix/share/man/$page.gz ]] || fail "$page: not installed; build target shardd_man"
done
for page in "$prefix"/share/man/man*/*.gz; do
  zcat "$page" >"$work/page"
  if command -v groff >/dev/null; then
    warnings=$(groff -ww -man -Tutf8 "$work/page" 2>&1 >/dev/null)
    [[ -z $warnings ]] || fail "${page##*/}: $warnings"
  fi
  if command -v mandoc >/dev/null; then
    warnings=$(mandoc -Tlint -W warning <"$work/page" | grep -v "missing date" || true)
    [[ -z $warnings ]] || fail "${page##*/}: $warnings"
  fi
  name=${page##*/} && name=${name%.*.gz}
  for flag in $("$prefix/bin/$name" --help | sed -nE 's/^  (-.,)?--([a-z_]+).*/\2/p'); do
    grep -qE "^\.B (\\\\-.,)?\\\\-\\\\-$flag" "$work/page" || fail "${page##*/}: no --$flag"
  done
done

cmake -G Ninja -S "$source/tests/install/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" \
  >"$work/log" 2>&1 && cmake --build "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; fail "a project with find_package(shardd) does not build"; }
"$work/build/c_consumer" || fail "the C consumer ended with an error"
# A home of its own, so that no daemon of this user is met.
export XDG_RUNTIME_DIR=$work/run TMPDIR=$work SHARDD_ADDRESS=
unset SHARDD_ADDRESS
mkdir -m 700 "$work/run"
timeout 60 "$work/build/cpp_consumer" || fail "the C++ consumer ended with an error"
# The example that client/docs/cpp.md walks through.
cmake -G Ninja -S "$source/client/examples/first" -B "$work/first" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" \
  >"$work/log" 2>&1 && cmake --build "$work/first" >>"$work/log" 2>&1 || { cat "$work/log"; fail "client/examples/first does not build"; }
RANK=1 WORLD_SIZE=2 timeout 60 "$work/first/first" >"$work/rank1" 2>&1 &
RANK=0 WORLD_SIZE=2 timeout 60 "$work/first/first" >"$work/rank0" || { cat "$work/rank0"; fail "rank 0 of the first example ended with an error"; }
wait $! || { cat "$work/rank1"; fail "rank 1 of the first example ended with an error"; }
awk '/: loss/ {loss = $4} END {exit !(loss != "" && loss < 0.01)}' "$work/rank0" ||
  { cat "$work/rank0"; fail "the first example did not learn"; }
[[ $("$prefix/bin/shardctl" --version) == *"$(sed -n 's/.*kVersion\[\] = "\(.*\)".*/\1/p' "$source/common/version.h")"* ]] ||
  fail "shardctl --version does not give the version"
echo "install_test: passed"
