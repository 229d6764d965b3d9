#!/usr/bin/env bash
# certs.sh: a private certificate authority for one installation, and the certificates that it signs.
#
#   certs.sh DIR                 DIR/ca.crt, ca.key, server.crt, server.key for localhost, 127.0.0.1 and ::1
#   certs.sh DIR --name HOST     the server answers to this DNS name or address too (may be repeated)
#   certs.sh DIR --client NAME   also DIR/client-NAME.crt and client-NAME.key, for clients that must show a certificate (may be repeated)
#   certs.sh DIR --force         make everything again, the authority included: clients must then get the new ca.crt
#
# What is there, fits and is valid for another 30 days is kept, so the script can run before every start. Certificates are valid
# for two years; the authority for ten, so that renewing a server does not mean visiting its clients. Keys are readable by their
# owner only; ca.key is needed by this script alone and is best moved off the server.

# P-256 throughout: libwebsockets with mbedTLS takes it on both sides, and a handshake costs the server a fraction of RSA's.

set -euo pipefail
umask 077
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"

leaf_days=730
authority_days=3650
renew_before_s=$((30 * 24 * 3600))

# ssl ARGS…: openssl without the machine's configuration, quiet unless it fails.
ssl() {
  local output
  output=$(OPENSSL_CONF=/dev/null openssl "$@" 2>&1) || die "openssl $1 failed: $(tail -n 1 <<<"$output")"
}

# pair_is_good STEM: certificate and key exist, belong together, and stay valid for a while.
pair_is_good() {
  local crt=$dir/$1.crt key=$dir/$1.key
  [ -s "$crt" ] && [ -s "$key" ] && openssl x509 -in "$crt" -noout -checkend "$renew_before_s" >/dev/null 2>&1 &&
    [ "$(openssl x509 -in "$crt" -noout -pubkey 2>/dev/null)" = "$(openssl pkey -in "$key" -pubout 2>/dev/null)" ]
}

signed_by_authority() { openssl verify -CAfile "$dir/ca.crt" "$dir/$1.crt" >/dev/null 2>&1; }

is_address() { [[ $1 == *:* || $1 =~ ^[0-9]+(\.[0-9]+){3}$ ]]; }

# covers_names STEM HOST…: the certificate is for every HOST.
covers_names() {
  local crt=$dir/$1.crt host option; shift
  for host in "$@"; do
    option=-checkhost
    if is_address "$host"; then option=-checkip; fi
    openssl x509 -in "$crt" -noout "$option" "$host" 2>/dev/null | grep -q 'does match' || return 1
  done
}

alternative_names() {
  local host list=''
  for host in "$@"; do
    if is_address "$host"; then list+=",IP:$host"; else list+=",DNS:$host"; fi
  done
  echo "${list#,}"
}

new_key() { ssl ecparam -name prime256v1 -genkey -noout -out "$work/$1.key"; }

# install_pair STEM: the key first, so that a certificate never stands beside no key.
install_pair() {
  chmod 644 "$work/$1.crt"
  mv -f "$work/$1.key" "$dir/$1.key"
  mv -f "$work/$1.crt" "$dir/$1.crt"
}

make_authority() {
  new_key ca
  # The random part of the name keeps two installations' authorities apart in a client that trusts both.
  printf '%s\n' '[req]' 'prompt = no' 'distinguished_name = name' '[name]' "CN = Tandem private CA $(openssl rand -hex 4)" '[ext]' \
    'basicConstraints = critical,CA:TRUE,pathlen:0' 'keyUsage = critical,keyCertSign,cRLSign' 'subjectKeyIdentifier = hash' >"$work/ca.cnf"
  ssl req -new -x509 -sha256 -days "$authority_days" -key "$work/ca.key" -config "$work/ca.cnf" -extensions ext -out "$work/ca.crt"
  install_pair ca
  say "certificates: new authority $dir/ca.crt"
}

# make_leaf STEM COMMON-NAME USAGE [NAMES]
make_leaf() {
  local stem=$1 common=$2 usage=$3 names=${4:-}
  [ -s "$dir/ca.key" ] || die "$dir/$stem.crt must be made but $dir/ca.key is gone: put it back, or start over with --force"
  new_key "$stem"
  printf '%s\n' '[req]' 'prompt = no' 'distinguished_name = name' '[name]' "CN = $common" '[ext]' 'basicConstraints = critical,CA:FALSE' \
    'keyUsage = critical,digitalSignature' "extendedKeyUsage = $usage" 'subjectKeyIdentifier = hash' 'authorityKeyIdentifier = keyid' \
    ${names:+"subjectAltName = $names"} >"$work/$stem.cnf"
  ssl req -new -sha256 -key "$work/$stem.key" -config "$work/$stem.cnf" -out "$work/$stem.csr"
  ssl x509 -req -sha256 -days "$leaf_days" -in "$work/$stem.csr" -CA "$dir/ca.crt" -CAkey "$dir/ca.key" \
    -set_serial "0x$(printf '%x' $((RANDOM % 112 + 16)))$(openssl rand -hex 15)" -extfile "$work/$stem.cnf" -extensions ext -out "$work/$stem.crt"
  install_pair "$stem"
  say "certificates: new $dir/$stem.crt"
}

# --- main ---------------------------------------------------------------------------------------------------------------

dir='' force='' hosts=(localhost 127.0.0.1 ::1) clients=()
while [ $# -gt 0 ]; do
  case $1 in
    --name | --client)
      [ $# -ge 2 ] || die "$1 needs a value (see --help)"
      # Names go into openssl's configuration and into file names.
      [[ $2 =~ ^[A-Za-z0-9*:][A-Za-z0-9._:*-]*$ ]] || die "$1 $2: letters, digits, dots, hyphens and colons only"
      if [ "$1" = --name ]; then hosts+=("$2"); else clients+=("$2"); fi
      shift ;;
    --force) force=1 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option $1 (see --help)" ;;
    *) [ -z "$dir" ] || die "one folder only (see --help)"; dir=$1 ;;
  esac
  shift
done
[ -n "$dir" ] || die "name the folder to make them in, as in: certs.sh certs --name cloud.example (see --help)"
have openssl || die "openssl is missing: run ./deploy/deps.sh"
[ -d "$dir" ] || (umask 022 && mkdir -p "$dir") || die "cannot create $dir: check the permissions of the folder above it"
lock "$dir/.lock" "the certificates in $dir"
work=$(mktemp -d "$dir/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT

authority_is_good() {
  # Without its key the authority is still good for clients and for what it has signed.
  if [ -s "$dir/ca.key" ]; then pair_is_good ca; else openssl x509 -in "$dir/ca.crt" -noout -checkend "$renew_before_s" >/dev/null 2>&1; fi
}

if [ -n "$force" ] || ! authority_is_good; then make_authority; fi
if [ -n "$force" ] || ! { pair_is_good server && signed_by_authority server && covers_names server "${hosts[@]}"; }; then
  make_leaf server localhost serverAuth "$(alternative_names "${hosts[@]}")"
fi
for client in ${clients[@]+"${clients[@]}"}; do
  if [ -n "$force" ] || ! { pair_is_good "client-$client" && signed_by_authority "client-$client"; }; then
    make_leaf "client-$client" "$client" clientAuth
  fi
done
done_ "certificates: ready in $dir"
