#!/usr/bin/env bash
# dated_certs.sh DIR: certificates that are out of date, for a server named localhost with the key DIR/server.key that deploy/certs.sh made there.
# In DIR/dates: expired.crt and future.crt, of the authority DIR/ca.crt; orphan.crt, of old.crt, an authority that has expired itself.
set -euo pipefail
mkdir "$1/dates"
cd "$1/dates"
export OPENSSL_CONF=/dev/null
: >index
echo 01 >serial
printf '%s\n' '[ca]' 'default_ca = a' '[a]' 'database = index' 'serial = serial' 'new_certs_dir = .' 'default_md = sha256' 'unique_subject = no' \
  'policy = p' '[p]' 'commonName = supplied' '[leaf]' 'subjectAltName = DNS:localhost' \
  '[authority]' 'basicConstraints = critical,CA:TRUE' 'keyUsage = critical,keyCertSign' >ca.cnf

sign() { # NAME FROM TO KEY SUBJECT OPTION…: of x509's commands only `openssl ca` takes dates
  openssl req -new -key "$4" -subj "/CN=$5" -out request.csr
  openssl ca -batch -notext -config ca.cnf -keyfile ../ca.key -in request.csr -startdate "$2" -enddate "$3" -out "$1.crt" "${@:6}"
}
{
  sign expired 20200101000000Z 20210203040506Z ../server.key localhost -extensions leaf -cert ../ca.crt
  sign future 21200203040506Z 21300101000000Z ../server.key localhost -extensions leaf -cert ../ca.crt
  sign old 20200101000000Z 20210203040506Z ../ca.key "an old authority" -extensions authority -selfsign
  sign orphan 20200101000000Z 21300101000000Z ../server.key localhost -extensions leaf -cert old.crt
} 2>openssl.log || { cat openssl.log >&2; exit 1; }
