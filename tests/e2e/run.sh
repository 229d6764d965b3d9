#!/usr/bin/env bash
# run.sh [PYTEST ARGUMENTS]: the end-to-end tests: real programs (build/release), real clients, real sockets on loopback.
# Makes a Python environment with the openai client and pytest in the cache the first time.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/deploy/lib.sh"

venv=$(cache_root)/e2e-venv
key=$(sha256_of "$here/requirements.txt")
if [ "$(cat "$venv/.ready" 2>/dev/null)" != "$key" ]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q -r "$here/requirements.txt"
  echo "$key" >"$venv/.ready"
fi
TANDEM_MODEL=${TANDEM_MODEL:-$("$root/deploy/fetch-model.sh")}
export TANDEM_MODEL TANDEM_BIN=${TANDEM_BIN:-$root/build/release/bin}
export no_proxy='*' NO_PROXY='*'

# The programs' files lie in memory where that has room: what fails, hangs or fills here is a disk that a test has made, not one that others keep busy for
# minutes. Those of a test that failed stay.
has_room_in_memory() {
  [ "$(stat -fc %T /dev/shm)" = tmpfs ] || return
  [ "$(df --output=avail -k /dev/shm | tail -n 1)" -ge $((8 << 20)) ] || return
  [ "$(awk '/^MemAvailable/ {print $2}' /proc/meminfo)" -ge $((12 << 20)) ] || return
  local program code=0
  program=$(mktemp /dev/shm/tandem-e2e.XXXXXX) || return
  printf '#!/bin/sh\n' >"$program" && chmod +x "$program" && "$program" || code=$? # it may be mounted so that nothing there can be run
  rm -f "$program"
  return $code
}
[ -n "${TMPDIR:-}" ] || ! has_room_in_memory 2>/dev/null || TMPDIR=/dev/shm
[ -z "${TMPDIR:-}" ] || export TMPDIR
cd "$here"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -o tmp_path_retention_policy=failed --durations=20 "$@"
