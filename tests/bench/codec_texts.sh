#!/usr/bin/env bash
# codec_texts.sh DIR: texts of eight kinds for `tandem bench codec`, from what a Debian machine with man pages has installed; none is in this repository.
#
#   ./tests/bench/codec_texts.sh /tmp/texts
#   tandem bench codec --model M --text /tmp/texts/*.txt --tokens 16384        65,536 tokens predicted, behind as many
#
# Manual pages as a reader sees them, in English, German, French, Russian and Japanese; licences; Python; C. Each ends after 200,000 bytes. A kind
# of which too little is installed is left out, with a word.
set -euo pipefail
[ $# = 1 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 2; }
out=$1 size=200000
mkdir -p "$out"

keep() { # the rest is read too: whoever writes must not fail
  { head -c "$size"; cat > /dev/null; } | iconv -c -f utf-8 -t utf-8 > "$out/$1.txt"
  [ "$(stat -c %s "$out/$1.txt")" -ge 60000 ] || { echo "codec_texts.sh: too little of $1 is installed: left out" >&2; rm "$out/$1.txt"; }
}
pages() { find "$@" -name '*.gz' -size +5k | sort | head -60 | while read -r page; do MANWIDTH=100 man -E UTF-8 -l "$page" 2>/dev/null | col -bx || true; done; }
sources() { find "$1" -maxdepth 1 -name "$2" -size +10k | sort | head -30 | xargs -r cat; }

pages /usr/share/man/man1 | keep english
for language in de fr ru ja; do pages /usr/share/man/$language | keep manual-$language; done
cat /usr/share/common-licenses/* | keep licences
sources "$(python3 -c 'import os; print(os.path.dirname(os.__file__))')" '*.py' | keep python
sources /usr/include '*.h' | keep c
ls -l "$out"
