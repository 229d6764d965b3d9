#!/usr/bin/env bash
# quickstart.sh: from nothing to a conversation that survives kill -9, on one machine.
#
#   quickstart.sh               dependencies, build, model, certificates, a cloud node and an edge agent on loopback, one
#                               question, kill -9 of both, restart, the conversation goes on; then a table of times and bytes
#   quickstart.sh --serve       the same preparations, then both programs run until Ctrl-C; what was said is kept for the next time
#   quickstart.sh --stop        stop them from another terminal, or when that terminal has gone
#   quickstart.sh --layers K    layers that the edge computes (default 8 of 30)
#   quickstart.sh --model FILE  another GGUF model (default: SmolLM2-135M-Instruct)
#
# Everything that it makes is in build/: build/quickstart begins empty each time, build/serve stays until you remove it. Works as
# root and with sudo.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"
root=$(dirname "$here")
cd "$root"

demo=$root/build/quickstart served=$root/build/serve
bin=$root/build/release/bin
serve='' layers=8 model=''

# is_gone PID: no such process, or a dead one whose last thread has ended too (until then it may still hold its ports).
is_gone() {
  local tasks=("/proc/$1/task/"*)
  ! kill -0 "$1" 2>/dev/null || { grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null && [ "${#tasks[@]}" -le 1 ]; }
}

# runs NAME: the program that was started from here is still there, as process $pid; its file may have been built anew since.
runs() {
  read -r pid 2>/dev/null <"$state/$1.pid" && [[ $(readlink "/proc/$pid/exe" 2>/dev/null) == "$bin/tandem-$1"?(" (deleted)") ]]
}

stop_programs() { # SIGNAL
  local name pid
  for name in edge cloud; do
    runs "$name" || continue
    rm -f "$state/$name.pid" # first: whoever watches it knows that it is asked to go
    kill "-$1" "$pid" 2>/dev/null || true
    while ! is_gone "$pid"; do sleep 0.05; done
    say "tandem-$name (process $pid) is stopped"
  done
}

while [ $# -gt 0 ]; do
  case $1 in
    --serve) serve=1 ;;
    --stop) for state in "$demo" "$served"; do stop_programs TERM; done; exit 0 ;;
    --layers) [[ ${2:-} =~ ^[0-9]+$ ]] || die "--layers wants a number, such as 8"; layers=$2; shift ;;
    --model) [ $# -ge 2 ] || die "--model wants a file"; model=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1: see --help" ;;
  esac
  shift
done

case $model in '' | *://*) ;; *) ./deploy/fetch-model.sh "$model" >/dev/null ;; esac # before minutes of building
mkdir -p build
lock build/quickstart.lock "another quickstart in this folder"
say "1/6 dependencies"
./deploy/deps.sh
say "2/6 build"
cmake --preset release >build-configure.log 2>&1 || { cat build-configure.log >&2; die "cmake failed"; }
rm -f build-configure.log
cmake --build build/release -j "$(nproc)" --target tandem tandem-edge tandem-cloud tandem_lib >&2
say "3/6 model"
model=$(./deploy/fetch-model.sh ${model:+"$model"})

say "4/6 private authority, certificate, token"
if [ -n "$serve" ]; then
  state=$served
  exec 9>>"$served.lock" # in place of the lock above
  flock -n 9 || die "it is running already, in another terminal: talk to it there, or end it with ./deploy/quickstart.sh --stop"
else
  state=$demo
fi
stop_programs TERM
[ -n "$serve" ] || rm -rf "$state"
mkdir -p "$state"
chmod 700 "$state"
./deploy/certs.sh "$state/certs"
umask 077
[ -s "$state/token" ] || "$bin/tandem-cloud" token new --tenant home --principal me --tokens-file "$state/tokens" >"$state/token"

# free_port WISH: that port, or where it is taken another one.
free_port() {
  python3 - "$1" <<'END'
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    s.bind(("127.0.0.1", int(sys.argv[1])))
except OSError:
    s.bind(("127.0.0.1", 0))
print(s.getsockname()[1])
END
}
if [ -n "$serve" ]; then wishes=(8443 9443 8081); else wishes=(0 0 0); fi # the programs' own, which tandem chat asks
cloud_port=$(free_port "${wishes[0]}") admin_port=$(free_port "${wishes[1]}") edge_port=$(free_port "${wishes[2]}")
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
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# serve: until Ctrl-C, --stop, or the end of one of the two.
serve() {
  local chat="build/release/bin/tandem chat" name
  [ "$edge_port" = 8081 ] || chat+=" --url $url"
  say "5/6 start"
  start_programs
  cat >"$state/env" <<END
export EDGE=$url CLOUD=https://localhost:$cloud_port CA=$state/certs/ca.crt TOKEN=\$(cat $state/token) MODEL=$model
export ADMIN=http://127.0.0.1:$admin_port STORE_KEY=$state/store.key
export PATH=$bin:\$PATH TANDEM_CHAT_URL=$url TANDEM_CONV_URL=$url
END
  done_ "6/6 both run until Ctrl-C. In another terminal, in this folder:"
  cat >&2 <<END

    $chat

  OpenAI base URL of the agent   $url/v1   (any API key)
  of the node                    https://localhost:$cloud_port/v1   (API key in $state/token, authority $state/certs/ca.crt)
  the node's metrics             http://127.0.0.1:$admin_port/metrics
  logs                           $state/edge.log, cloud.log
  README's examples first need   . build/serve/env

END
  trap 'exit 0' INT TERM
  trap 'exec 2>/dev/null; exit 0' HUP # the terminal has gone
  while runs edge && runs cloud; do sleep 0.5; done
  for name in edge cloud; do
    [ ! -f "$state/$name.pid" ] || runs "$name" || { tail -n 5 "$state/$name.log" >&2; die "tandem-$name has ended; its log is $state/$name.log"; }
  done
}
if [ -n "$serve" ]; then
  serve
  exit 0
fi

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

done_ "done; both programs are stopped. ./deploy/quickstart.sh --serve runs them for you to talk to."
