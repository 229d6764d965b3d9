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
room=0
[ "$(stat -fc %T /dev/shm 2>/dev/null)" != tmpfs ] || room=$(df --output=avail -k /dev/shm | tail -n 1)
available=$(awk '/^MemAvailable/ {print $2}' /proc/meminfo)
fast=/tmp
[ "$room" -lt $((8 << 20)) ] || [ "$available" -lt $((12 << 20)) ] || fast=/dev/shm
TMPDIR=${TMPDIR:-$fast}
export TMPDIR
cd "$here"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -o tmp_path_retention_policy=failed --durations=20 "$@"
