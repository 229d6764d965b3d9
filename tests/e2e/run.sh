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
cd "$here"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider --durations=20 "$@"
