#!/usr/bin/env bash
# links.sh: Tandem over shaped links: cloud-only, edge-only, fixed splits and the planner.
#
#   links.sh                     every shape: 1 to 1000 Mbit/s, 2 to 100 ms, 128 to 4,096 tokens, ten repeats, all splits (hours)
#   links.sh --quick             54 shapes, two repeats (one of the long prompts at other delays than 20 ms), fixed splits of one; paced computing unless told otherwise; a chart, ./links.svg; under half an hour
#   links.sh --whole --save F    72 shapes with computing as it is: all rates, 2, 20 and 100 ms, 128, 512, 2,048 and 4,096 tokens, 4 to 1 pairs and some more where one looks late; fixed
#                                splits of some; half an hour (--minutes); F has what was measured so far. --rates, --delays, --prompts: parts of it
#   links.sh --smoke             one shape, two repeats; under 90 s
#   links.sh --rates 100 --delays 20 --prompts 512,2048 --fixed 8,15 --repeats 5     these
#   links.sh --rates 100 --prompts 2048 --cost          --prefer cloud-cost too
#   links.sh --drop 1            the rate falls from 100 to 1 Mbit/s in the middle of a prompt (paced)
#   links.sh --stumble 250       the link stands still for 250 ms in the middle of a prompt
#   links.sh --goodput           how much of a full uplink is payload, of KV that the device holds already
#   links.sh --restore           a conversation that the cloud has lost: sent by the device, or computed again
#   links.sh --cancel            how soon a CANCEL works on a full uplink
#     --json   one JSON object instead of the table      --svg FILE   a chart      --verbose   every run
#     --together   cloud-only and edge-only at the same time: what two cores of one machine cost each other is then in all modes
#     --keep-window   TCP keeps its window when idle (a kernel's default is to begin anew, from 10 packets)
#
# Cloud and device are in network namespaces of their own, a core each; between them tests/bench/links_relay.c forwards IP packets. What is compared with
# what, and how: tests/bench/links.py. TANDEM_PACED_LAYER_US=X takes the noise out: computing takes X microseconds a token and layer on both sides,
# with a thin copy of the model, whose real computing stays below that (tests/bench/links_model.py).
# Needs root, two cores, /dev/net/tun, ip and a C compiler; says so and exits with 77 where one is missing. TANDEM_BIN and TANDEM_MODEL as for tests/e2e.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/deploy/lib.sh"

skip() { echo "links.sh: skipped: $*" >&2; exit 77; }
for argument; do
  case $argument in -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
done
[ "$(id -u)" = 0 ] || skip "needs root"
[ -c /dev/net/tun ] || skip "there is no /dev/net/tun"
[ "$(nproc)" -ge 2 ] || skip "needs two cores"
for tool in ip taskset unshare cc python3; do command -v "$tool" >/dev/null || skip "there is no $tool"; done

edge_ns=tandem-edge-$$ cloud_ns=tandem-cloud-$$
work=$(mktemp -d /dev/shm/tandem-links.XXXXXX) # the store's fsync is not what is measured
clean_up() {
  [ -z "${bench:-}" ] || { kill "$bench" 2>/dev/null && wait "$bench" || true; }
  ip netns del "$edge_ns" 2>/dev/null || true
  ip netns del "$cloud_ns" 2>/dev/null || true
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
# First: `ip netns add` leaves a mount behind, which a chroot could then not be removed with.
unshare --mount mount --make-rslave / 2>/dev/null || skip "/ is no mount point here, as in a chroot: a program cannot enter a network namespace"
ip netns add "$edge_ns" 2>/dev/null || skip "network namespaces are not allowed here"
ip netns add "$cloud_ns"

cc -std=c17 -O2 -o "$work/relay" "$here/links_relay.c"
model=${TANDEM_MODEL:-$("$root/deploy/fetch-model.sh")}
PYTHONDONTWRITEBYTECODE=1 python3 "$here/links.py" --x-root "$root" --x-bin "${TANDEM_BIN:-$root/build/release/bin}" --x-dir "$work" --x-model "$model" \
  --x-relay "$work/relay" --x-edge-ns "$edge_ns" --x-cloud-ns "$cloud_ns" "$@" &
bench=$!
wait "$bench"
