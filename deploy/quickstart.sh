#!/usr/bin/env bash
# quickstart.sh: from nothing to a conversation that survives kill -9, on one machine.
#
#   quickstart.sh               dependencies, build, model, certificates, a cloud node and an edge agent on loopback, one
#                               question, kill -9 of both, restart, the conversation goes on; then a table of times and bytes
#   quickstart.sh --serve       the same, and leaves both programs running (quickstart.sh --stop ends them)
#   quickstart.sh --stop        stop what --serve left running
#   quickstart.sh --layers K    layers that the edge computes (default 8 of 30)
#   quickstart.sh --model FILE  another GGUF model (default: SmolLM2-135M-Instruct)
#
# Everything that it makes is in build/; running it again starts with an empty store. Works as root and with sudo.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"
root=$(dirname "$here")
cd "$root"

state=$root/build/quickstart
bin=$root/build/release/bin
serve='' layers=8 model=''

# is_gone PID: no such process, or a dead one whose last thread has ended too (until then it may still hold its ports).
is_gone() {
  local tasks=("/proc/$1/task/"*)
  ! kill -0 "$1" 2>/dev/null || { grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null && [ "${#tasks[@]}" -le 1 ]; }
}

stop_programs() { # SIGNAL
  local name pid
  for name in edge cloud; do
    [ -f "$state/$name.pid" ] || continue
    pid=$(<"$state/$name.pid")
    if [ "$(readlink "/proc/$pid/exe" 2>/dev/null)" = "$bin/tandem-$name" ]; then
      kill "-$1" "$pid" 2>/dev/null || true
      while ! is_gone "$pid"; do sleep 0.05; done
      say "tandem-$name (process $pid) is stopped"
    fi
    rm -f "$state/$name.pid"
  done
}

while [ $# -gt 0 ]; do
  case $1 in
    --serve) serve=1 ;;
    --stop) stop_programs TERM; exit 0 ;;
    --layers) [[ ${2:-} =~ ^[0-9]+$ ]] || die "--layers wants a number, such as 8"; layers=$2; shift ;;
    --model) [ $# -ge 2 ] || die "--model wants a file"; model=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1: see --help" ;;
  esac
  shift
done

mkdir -p build
lock build/quickstart.lock "another quickstart in this folder"
say "1/6 dependencies"
./deploy/deps.sh
say "2/6 build"
cmake --preset release >build-configure.log 2>&1 || { cat build-configure.log >&2; die "cmake failed"; }
rm -f build-configure.log
cmake --build build/release -j "$(nproc)" --target tandem tandem-edge tandem-cloud >&2
say "3/6 model"
model=$(./deploy/fetch-model.sh ${model:+"$model"})

say "4/6 private authority, certificate, token"
stop_programs TERM
rm -rf "$state"
mkdir -p "$state"
chmod 700 "$state"
./deploy/certs.sh "$state/certs"
umask 077
"$bin/tandem-cloud" token new --tenant home --principal me --tokens-file "$state/tokens" >"$state/token"

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
cloud_port=$(free_port) admin_port=$(free_port) edge_port=$(free_port)
url=http://127.0.0.1:$edge_port

wait_for() { # NAME URL
  local n
  for n in $(seq 600); do
    curl -fsS -o /dev/null --noproxy '*' "$2" 2>/dev/null && return 0
    kill -0 "$(<"$state/$1.pid")" 2>/dev/null || { tail -n 5 "$state/$1.log" >&2; die "tandem-$1 stopped; its log is $state/$1.log"; }
    sleep 0.1
  done
  tail -n 5 "$state/$1.log" >&2
  die "tandem-$1 is not ready after a minute; its log is $state/$1.log"
}
start_programs() {
  setsid "$bin/tandem-cloud" --model "$model" --listen-port "$cloud_port" --admin-port "$admin_port" --cert "$state/certs/server.crt" \
    --key "$state/certs/server.key" --tokens-file "$state/tokens" --store "$state/cloud" --store-key-file "$state/store.key" \
    >>"$state/cloud.log" 2>&1 </dev/null 9>&- &
  echo $! >"$state/cloud.pid"
  setsid "$bin/tandem-edge" --model "$model" --cloud "localhost:$cloud_port" --ca "$state/certs/ca.crt" --token-file "$state/token" \
    --edge-layers "$layers" --listen-port "$edge_port" --data "$state/edge" >>"$state/edge.log" 2>&1 </dev/null 9>&- &
  echo $! >"$state/edge.pid"
  disown -a
  wait_for cloud "http://127.0.0.1:$admin_port/health"
  wait_for edge "$url/health"
}
trap 'stop_programs TERM' EXIT

say "5/6 a question, through the edge agent's OpenAI API at $url"
start_programs
python3 deploy/ask.py --url "$url" --out "$state/turn1.json" --message-file deploy/question.txt
conversation=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["conversation"])' "$state/turn1.json")

say "kill -9 of both programs"
stop_programs KILL
say "6/6 both started again; the conversation goes on"
start_programs
python3 deploy/ask.py --url "$url" --out "$state/turn2.json" --conversation "$conversation" \
  --message "Thank you. Say the main point again in one short sentence."
echo
python3 deploy/ask.py --table "$state/turn1.json" "$state/turn2.json"

if [ -n "$serve" ]; then
  trap - EXIT
  cat >"$state/env" <<END
export EDGE=$url CLOUD=https://localhost:$cloud_port CA=$state/certs/ca.crt TOKEN=\$(cat $state/token) MODEL=$model
export ADMIN=http://127.0.0.1:$admin_port STORE_KEY=$state/store.key
export PATH=$bin:\$PATH TANDEM_CHAT_URL=$url TANDEM_CONV_URL=$url
END
  done_ "running: OpenAI API of the agent at $url/v1, of the node at https://localhost:$cloud_port/v1, metrics at http://127.0.0.1:$admin_port/metrics"
  done_ "talk to it: . build/quickstart/env && tandem chat      stop it: ./deploy/quickstart.sh --stop"
else
  done_ "done; both programs are stopped. ./deploy/quickstart.sh --serve leaves them running."
fi
