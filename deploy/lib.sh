# shellcheck shell=bash
# lib.sh: what the scripts of this folder share; sourced, never run.
#
# Messages go to stderr, because stdout is for results that another program reads (a path, a table).
# Colours appear only where stderr is a terminal.

if [ -t 2 ] && [ "${TERM:-dumb}" != dumb ] && [ -z "${NO_COLOR:-}" ]; then
  bold=$'\e[1m' red=$'\e[31m' green=$'\e[32m' plain=$'\e[0m'
else
  bold='' red='' green='' plain=''
fi
program=${0##*/}

say()  { printf '%s==>%s %s\n' "$bold" "$plain" "$*" >&2; }
done_() { printf '%s==>%s %s\n' "$bold$green" "$plain" "$*" >&2; }
warn() { printf '%s%s: warning:%s %s\n' "$bold" "$program" "$plain" "$*" >&2; }
die()  { printf '%s%s: error:%s %s\n' "$bold$red" "$program" "$plain" "$*" >&2; exit 1; }

# usage: print the comment block that opens the calling script (from its second line to the first line of code).
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

have() { command -v "$1" >/dev/null 2>&1; }

# cache_root: where Tandem keeps what can be made again. Root's cache is for the whole machine.
cache_root() {
  if [ "$(id -u)" -eq 0 ]; then
    echo /var/cache/tandem
  else
    [ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || die "neither HOME nor XDG_CACHE_HOME is set, so there is no place for a cache: set one of them"
    echo "${XDG_CACHE_HOME:-$HOME/.cache}/tandem"
  fi
}

# lock FILE WHAT: hold FILE (on descriptor 9) until this process ends, saying so when another one has it.
lock() {
  exec 9>>"$1" || die "cannot write the lock file $1: check the permissions of its folder"
  if ! flock -n 9; then
    say "waiting for another process that is busy with $2"
    flock 9
  fi
}

sha256_of() { sha256sum -- "$1" | cut -d' ' -f1; }
