#!/usr/bin/env bash
# deps.sh: install what Tandem is built from, once. Running it again costs nothing.
#
#   deps.sh                 Debian packages that are missing, then mbedTLS and libwebsockets (static, built here)
#   deps.sh --test          also the packages that only the tests and checks need
#   deps.sh --tarballs DIR  build from the source tarballs in DIR instead of fetching them (offline, other distributions)
#   deps.sh --no-packages   do not touch packages
#   deps.sh --rebuild       build the two libraries again, from the newest tarballs (security updates of mbedTLS 3.6)
#   deps.sh --prefix        only print where the libraries are, or will be
#
# Packages need root or sudo; nothing else does. The libraries go to /var/cache/tandem (root) or
# ${XDG_CACHE_HOME:-~/.cache}/tandem, in a folder named after the recipe below, so that they outlive build folders and a
# changed recipe never meets an old library. The tarballs that were used are kept beside them, in `tarballs`.
#
# For --tarballs, DIR holds libwebsockets_4.3.5.orig.tar.gz (or libwebsockets-4.3.5.tar.gz) and mbedtls_3.6.x.orig.tar.bz2
# (or mbedtls-3.6.x.tar.bz2). Their SHA-256 must be known to this script or stand in DIR/SHA256SUMS.

# Why built here: Debian 12's libwebsockets is linked to OpenSSL, and its mbedTLS 2.28 is out of support and slow at AES-GCM.
# The sources come from Debian 13's index through a private apt state: apt checks the signatures, the user's sources stay as they are.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"

build_packages=(build-essential cmake ninja-build pkg-config libzstd-dev libsqlite3-dev libprotobuf-c-dev protobuf-c-compiler
  protobuf-compiler libjansson-dev libpcre2-dev libutf8proc-dev libcurl4-openssl-dev libhiredis-dev libsodium-dev libcmocka-dev ca-certificates curl openssl unzip xz-utils bzip2
  python3 python3-pip python3-venv procps)
test_packages=(clang clang-format cppcheck iproute2 libclang-rt-14-dev redis-server)
# The engine's tests for 64-bit Arm are cross-compiled and emulated; on such a machine the usual tests are those.
[ "$(uname -m)" != x86_64 ] || test_packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

# --- the recipe: everything here is part of the prefix's name ---------------------------------------------------------

recipe_revision=1
lws_version=4.3.5
lws_sha256=87f99ad32803ed325fceac5327aae1f5c1b417d54ee61ad36cffc8df5f5ab276
mbedtls_series=3.6
source_release=trixie

c_flags='-O3 -fPIC -fstack-protector-strong'
# Without -maes mbedTLS falls back to inline assembly that does little more than half the bytes a second of AES-GCM.
[ "$(uname -m)" = x86_64 ] && c_flags+=' -maes -mpclmul -msse4.1'

# Several threads share the random generator and PSA's state.
mbedtls_on=(MBEDTLS_THREADING_C MBEDTLS_THREADING_PTHREAD)
mbedtls_ciphers=(
  MBEDTLS_TLS_ECDHE_{ECDSA,RSA}_WITH_AES_128_GCM_SHA256
  MBEDTLS_TLS_ECDHE_{ECDSA,RSA}_WITH_AES_256_GCM_SHA384
  MBEDTLS_TLS_ECDHE_{ECDSA,RSA}_WITH_CHACHA20_POLY1305_SHA256)
# What nobody should negotiate cannot be negotiated if it is not there: key exchanges without forward secrecy, CBC,
# renegotiation, DTLS, old curves and ciphers. TLS 1.3 goes because libwebsockets' binding pins 1.2.
mbedtls_off=(
  MBEDTLS_KEY_EXCHANGE_{PSK,DHE_PSK,ECDHE_PSK,RSA_PSK,RSA,DHE_RSA,ECDH_ECDSA,ECDH_RSA}_ENABLED
  MBEDTLS_SSL_{RENEGOTIATION,ENCRYPT_THEN_MAC,CONTEXT_SERIALIZATION,PROTO_TLS1_3,TLS1_3_COMPATIBILITY_MODE}
  MBEDTLS_SSL_TLS1_3_KEY_EXCHANGE_MODE_{PSK,EPHEMERAL,PSK_EPHEMERAL}_ENABLED
  MBEDTLS_SSL_{PROTO_DTLS,DTLS_CONNECTION_ID,DTLS_CONNECTION_ID_COMPAT,DTLS_ANTI_REPLAY,DTLS_HELLO_VERIFY,DTLS_CLIENT_PORT_REUSE,COOKIE_C}
  MBEDTLS_CIPHER_MODE_{CBC,CFB,OFB,XTS}
  MBEDTLS_ECP_DP_{SECP192R1,SECP224R1,SECP192K1,SECP224K1,SECP256K1,BP256R1,BP384R1,BP512R1,CURVE448}_ENABLED
  MBEDTLS_{ARIA,CAMELLIA,CCM,DES,DHM,ECJPAKE,LMS,NIST_KW,PADLOCK,PKCS5,PKCS7,PKCS12,RIPEMD160}_C
  MBEDTLS_{X509_CREATE,X509_CRT_WRITE,X509_CSR_WRITE,X509_CSR_PARSE,PSA_CRYPTO_STORAGE,PSA_ITS_FILE}_C
  MBEDTLS_SELF_TEST)

lws_options=(
  LWS_WITH_SSL=ON LWS_WITH_MBEDTLS=ON LWS_WITH_STATIC=ON LWS_WITH_SHARED=OFF LWS_STATIC_PIC=ON LWS_IPV6=ON
  LWS_WITHOUT_TESTAPPS=ON LWS_WITH_MINIMAL_EXAMPLES=OFF LWS_WITHOUT_EXTENSIONS=ON LWS_WITH_ZLIB=OFF LWS_WITH_HTTP2=OFF
  LWS_WITH_PLUGINS=OFF LWS_WITH_EVLIB_PLUGINS=OFF LWS_WITH_LIBUV=OFF LWS_WITH_LIBEV=OFF LWS_WITH_LIBEVENT=OFF LWS_WITH_GLIB=OFF
  LWS_WITH_UDP=OFF LWS_WITH_SYS_ASYNC_DNS=OFF LWS_CTEST_INTERNET_AVAILABLE=OFF
  LWS_WITH_NETLINK=OFF # it closes good connections when any network interface goes, a container's for instance
  LWS_HAVE_LIBCAP=OFF DISABLE_WERROR=ON)

# Full TLS records instead of 1,460 bytes each, for 40 % less CPU on the sending side.
lws_record_edit='s/^#define SSL_SEND_DATA_MAX_LENGTH 1460$/#define SSL_SEND_DATA_MAX_LENGTH 16384/'
lws_record_check='^#define SSL_SEND_DATA_MAX_LENGTH 16384$'
# "Fail without a client certificate" must fail also for a client that sends no server name.
lws_verify_edit='/^static int ssl_pm_reload_crt(/,/^}/ s/MBEDTLS_SSL_VERIFY_OPTIONAL/MBEDTLS_SSL_VERIFY_REQUIRED/'
# The last fraction of a millisecond before a timer is slept, not spun: a timer every 2.9 ms took 29 % of a core, now 1 %.
lws_timer_edit='/^lws_service_adjust_timeout(/,/^}/ s|timeout_ms = (int)(u / 1000);|timeout_ms = (int)((u + 999) / 1000);|'
# A pipelined request with a body: its bytes were freed while they were still being read. The loop that did it is for HTTP/2.
lws_pipeline_edit='/^lws_http_action(/,/^}/ s|^\twhile (1) {$|\twhile (wsi->mux_substream) {|'

# mbedTLS tarballs that are known good without apt's word for it.
mbedtls_known_sha256=(8fb65fae8dcae5840f793c0a334860a411f884cc537ea290ce1c52bb64ca007a)

recipe() {
  printf '%s\n' "$recipe_revision" "$(uname -m)" "$lws_version" "$mbedtls_series" "$c_flags" "${mbedtls_on[*]}" "${mbedtls_ciphers[*]}" \
    "${mbedtls_off[*]}" "${lws_options[*]}" "$lws_record_edit" "$lws_verify_edit" "$lws_timer_edit" "$lws_pipeline_edit"
}

# --- where --------------------------------------------------------------------------------------------------------------

key() { printf 'lws%s-mbedtls%s-%s-%.12s\n' "$lws_version" "$mbedtls_series" "$(uname -m)" "$(recipe | sha256sum)"; }

# A user takes what root has built for the machine.
find_prefix() {
  local name; name=$(key)
  if [ -e "/var/cache/tandem/deps/$name/.complete" ]; then
    echo "/var/cache/tandem/deps/$name"
  else
    echo "$(cache_root)/deps/$name"
  fi
}

# --- packages -----------------------------------------------------------------------------------------------------------

missing_packages() {
  local name
  for name in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)" = installed ] || echo "$name"
  done
}

# start_log: the log is about the last run that did something.
start_log() {
  [ -n "$log_started" ] || : >"$log"
  log_started=1
}

# as_root COMMAND…: run it as root, or end with one line that says how.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif have sudo; then
    sudo DEBIAN_FRONTEND=noninteractive "$@"
  else
    die "packages are missing and neither root nor sudo is at hand: as root, run: apt-get install ${packages_to_install[*]}"
  fi
}

# A bundle that someone put in place by hand, as behind a proxy with an authority of its own, would be overwritten when the package
# ca-certificates arrives. What the new bundle lacks of it then goes where Debian looks for a machine's own certificates.
ca_bundle=/etc/ssl/certs/ca-certificates.crt

save_own_bundle() {
  if [ -s "$ca_bundle" ] && [ -n "$(missing_packages ca-certificates)" ]; then cp "$ca_bundle" "$1/bundle"; fi
}

restore_own_certificates() {
  local folder=$1
  [ -s "$folder/bundle" ] || return 0
  awk -v folder="$folder" '
    FNR == 1 { file++ }
    /^-----BEGIN CERTIFICATE/ { block = ""; inside = 1 }
    inside { block = block $0 "\n" }
    /^-----END CERTIFICATE/ {
      inside = 0
      if (file == 2 && !(block in seen)) { name = folder "/kept-" ++count ".crt"; printf "%s", block >name; close(name) }
      seen[block] = 1
    }' "$ca_bundle" "$folder/bundle"
  compgen -G "$folder/kept-*.crt" >/dev/null || return 0
  say "packages: keeping this machine's own certificates"
  { as_root install -m 644 -t /usr/local/share/ca-certificates "$folder"/kept-*.crt && as_root update-ca-certificates; } >>"$log" 2>&1 </dev/null ||
    die "could not keep this machine's own certificates; $(last_words)"
}

install_packages() {
  local own_certificates
  if ! have dpkg-query || ! have apt-get; then
    warn "this is not a Debian system: packages are left to you (see the list at the top of deploy/deps.sh)"
    return
  fi
  mapfile -t packages_to_install < <(missing_packages "$@")
  if [ ${#packages_to_install[@]} -eq 0 ]; then
    say "packages: all $# are there"
    return
  fi
  start_log
  say "packages: installing ${packages_to_install[*]}"
  export DEBIAN_FRONTEND=noninteractive
  as_root apt-get -q -o DPkg::Lock::Timeout=300 update >>"$log" 2>&1 </dev/null ||
    die "apt-get update failed; $(last_words)"
  own_certificates=$(mktemp -d "$root/deps/.certificates.XXXXXX")
  scratch+=("$own_certificates")
  save_own_bundle "$own_certificates"
  as_root apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${packages_to_install[@]}" >>"$log" 2>&1 </dev/null ||
    die "apt-get install failed; $(last_words)"
  restore_own_certificates "$own_certificates"
}

check_tools() {
  local tool
  for tool in cc cmake ninja pkg-config tar bzip2 flock; do
    have "$tool" || die "$tool is missing: install it, or run deploy/deps.sh without --no-packages on Debian"
  done
}

# --- tarballs -----------------------------------------------------------------------------------------------------------

# debian_mirror: the URI that this machine already uses for its own Debian release; apt knows every form of sources file.
# shellcheck disable=SC2016 # $(…) is apt's own notation here
debian_mirror() {
  local codename release origin repo_codename component uri
  # shellcheck source=/dev/null
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  while IFS='|' read -r origin release repo_codename component uri; do
    [[ $origin == Debian || -z $origin || $origin == '$('* ]] || continue
    [[ $component == main ]] || continue
    if [[ $release == "$codename" || $repo_codename == "$codename" ]]; then
      echo "$uri"
      return
    fi
  done < <(apt-get indextargets --format '$(ORIGIN)|$(RELEASE)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages')
}

# private_apt ARGS…: apt-get on a state of its own under $work/apt. The machine's proxies and certificates stay in force, its
# sources, lists and update hooks do not.
private_apt() {
  local state=$work/apt
  apt-get -q -c "$state/apt.conf" -o Dir::State::Lists="$state/lists" -o Dir::Cache="$state/cache" -o Dir::Etc::SourceList=/dev/null \
    -o Dir::Etc::SourceParts="$state/sources" -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}

fetch_tarballs() {
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror=
  have apt-get && mirror=$(debian_mirror)
  [ -n "$mirror" ] || die "no Debian mirror among this machine's apt sources: fetch the tarballs elsewhere and pass --tarballs DIR (see --help)"
  # Early Debian 12 does not know the keys of Debian 13; its own update brings them, signed with keys that it has.
  if [ ! -e "/usr/share/keyrings/debian-archive-$source_release-stable.gpg" ]; then
    say "packages: updating debian-archive-keyring, which lacks the keys of Debian $source_release"
    packages_to_install=(debian-archive-keyring)
    { as_root apt-get -q -o DPkg::Lock::Timeout=300 update && as_root apt-get -q -y install debian-archive-keyring; } >>"$log" 2>&1 </dev/null ||
      die "could not update debian-archive-keyring; $(last_words)"
  fi
  mkdir -p "$work"/apt/{lists/partial,cache/archives/partial,sources} "$work/tarballs"
  cat >"$work/apt/apt.conf" <<'END'
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
END
  printf 'Types: deb-src\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$mirror" "$source_release" "$keyring" \
    >"$work/apt/sources/$source_release.sources"
  say "sources: fetching libwebsockets and mbedTLS, checked against Debian's signed index"
  private_apt update >>"$log" 2>&1 </dev/null || die "fetching the source index failed; $(last_words)"
  # apt turns some failures of update into warnings.
  compgen -G "$work/apt/lists/*Sources*" >/dev/null || die "the source index did not arrive; $(last_words)"
  (cd "$work/tarballs" && private_apt source --download-only --tar-only "libwebsockets/$source_release" "mbedtls/$source_release") \
    >>"$log" 2>&1 </dev/null || die "fetching the source tarballs failed; $(last_words)"
  (cd "$work/tarballs" && sha256sum -- *.tar.* >SHA256SUMS)
}

# one_tarball DIR GLOB…: the newest match, by version.
one_tarball() {
  local dir=$1 pattern; shift
  for pattern in "$@"; do compgen -G "$dir/$pattern" || true; done | sort -V | tail -n 1
}

# check_tarball FILE KNOWN…: FILE's digest is one of KNOWN, or FILE's folder vouches for it.
check_tarball() {
  local file=$1 digest known; shift
  digest=$(sha256_of "$file")
  for known in "$@"; do [ "$digest" = "$known" ] && return; done
  grep -qsE "^$digest [ *](\./)?${file##*/}\$" "${file%/*}/SHA256SUMS" ||
    die "$file has the unknown SHA-256 $digest: use Debian's tarball, or list it in ${file%/*}/SHA256SUMS if you trust it"
}

find_tarballs() {
  local dir=$1
  lws_tarball=$(one_tarball "$dir" "libwebsockets_$lws_version.orig.tar.*" "libwebsockets-$lws_version.tar.*")
  mbedtls_tarball=$(one_tarball "$dir" "mbedtls_$mbedtls_series.*.orig.tar.*" "mbedtls-$mbedtls_series.*.tar.*")
  [ -n "$lws_tarball" ] || die "no libwebsockets $lws_version tarball in $dir (see --help)"
  [ -n "$mbedtls_tarball" ] || die "no mbedTLS $mbedtls_series tarball in $dir (see --help)"
  if [ -z "$tarballs" ]; then
    # What came through apt has one known answer for libwebsockets, and apt's signature check for mbedTLS.
    [ "$(sha256_of "$lws_tarball")" = "$lws_sha256" ] || die "libwebsockets $lws_version from the mirror is not the expected file: SHA-256 differs from $lws_sha256"
  fi
  check_tarball "$lws_tarball" "$lws_sha256"
  check_tarball "$mbedtls_tarball" "${mbedtls_known_sha256[@]}"
}

# --- build --------------------------------------------------------------------------------------------------------------

last_words() { printf 'the log is %s; its last line: %s' "$log" "$(grep -v '^[[:space:]]*$' "$log" | tail -n 1)"; }

# logged WHAT COMMAND…: run COMMAND into the log; WHAT names the step when it fails.
logged() {
  local what=$1; shift
  printf '\n### %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null || die "$what failed; $(last_words)"
}

unpack() { mkdir -p "$2" && logged "unpacking $1" tar -xf "$1" -C "$2" --strip-components=1 --no-same-owner; }

# configure_mbedtls FILE: edit mbedtls_config.h itself, so that the installed headers and the library agree for every user.
configure_mbedtls() {
  local file=$1 name list script=''
  list=$(IFS=,; echo "${mbedtls_ciphers[*]}")
  for name in "${mbedtls_off[@]}"; do script+="s|^#define $name\\>.*|//&|;"; done
  for name in "${mbedtls_on[@]}"; do script+="s|^//#define $name\$|#define $name|;"; done
  script+="s|^//#define MBEDTLS_SSL_CIPHERSUITES .*|#define MBEDTLS_SSL_CIPHERSUITES $list|"
  sed -i -e "$script" "$file"
  for name in "${mbedtls_off[@]}"; do
    grep -q "^//#define $name\\>" "$file" || die "mbedTLS: $name could not be turned off: its configuration file has changed"
  done
  for name in "${mbedtls_on[@]}" MBEDTLS_SSL_CIPHERSUITES; do
    grep -q "^#define $name\\>" "$file" || die "mbedTLS: $name could not be turned on: its configuration file has changed"
  done
}

# The build type is None because mbedTLS appends flags of its own (-O2) to the known types.
build_mbedtls() {
  say "mbedTLS: building ${mbedtls_tarball##*/}"
  unpack "$mbedtls_tarball" "$work/mbedtls"
  configure_mbedtls "$work/mbedtls/include/mbedtls/mbedtls_config.h"
  logged "configuring mbedTLS" cmake -G Ninja -S "$work/mbedtls" -B "$work/mbedtls-build" -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="$c_flags" \
    -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib -DENABLE_PROGRAMS=OFF -DENABLE_TESTING=OFF -DGEN_FILES=OFF \
    -DMBEDTLS_FATAL_WARNINGS=OFF -DUSE_STATIC_MBEDTLS_LIBRARY=ON -DUSE_SHARED_MBEDTLS_LIBRARY=OFF
  logged "building mbedTLS" cmake --build "$work/mbedtls-build"
  logged "installing mbedTLS" env DESTDIR="$work/stage" cmake --install "$work/mbedtls-build"
}

edit_lws() {
  local wrapper=$work/lws/lib/tls/mbedtls/wrapper service=$work/lws/lib/core-net/service.c
  local server=$work/lws/lib/roles/http/server/server.c
  local lib=$wrapper/library/ssl_lib.c pm=$wrapper/platform/ssl_pm.c
  sed -i -e "$lws_record_edit" "$lib"
  grep -q "$lws_record_check" "$lib" || die "libwebsockets: the edit of SSL_SEND_DATA_MAX_LENGTH in ssl_lib.c did not take"
  grep -q MBEDTLS_SSL_VERIFY_OPTIONAL "$pm" || die "libwebsockets: ssl_pm.c is not the file that the edit of its verify mode is for"
  sed -i -e "$lws_verify_edit" "$pm"
  if grep -q MBEDTLS_SSL_VERIFY_OPTIONAL "$pm"; then die "libwebsockets: the edit of the verify mode in ssl_pm.c did not take"; fi
  sed -i -e "$lws_timer_edit" "$service"
  grep -qF 'timeout_ms = (int)((u + 999) / 1000);' "$service" || die "libwebsockets: the edit of the timer wait in service.c did not take"
  sed -i -e "$lws_pipeline_edit" "$server"
  grep -qF 'while (wsi->mux_substream) {' "$server" || die "libwebsockets: the edit of the pipelined body in server.c did not take"
}

# libwebsockets probes mbedTLS by linking. A probe that does not link is taken for "absent" without a word, and server names or
# client certificates are then silently missing: so all twelve must be found.
check_lws_probes() {
  local config=$1 found
  found=$(grep -c '^#define LWS_HAVE_mbedtls_' "$config" || true)
  [ "$found" -eq 12 ] || die "libwebsockets found $found of 12 mbedTLS functions, so parts of TLS would be missing; the log is $log"
}

build_lws() {
  local staged=$work/stage$prefix option options=() x509 crypto
  say "libwebsockets: building ${lws_tarball##*/}"
  unpack "$lws_tarball" "$work/lws"
  edit_lws
  for option in "${lws_options[@]}"; do options+=("-D$option"); done
  crypto="$staged/lib/libmbedcrypto.a;$staged/lib/libeverest.a;$staged/lib/libp256m.a"
  x509="$staged/lib/libmbedx509.a;$crypto"
  logged "configuring libwebsockets" cmake -G Ninja -S "$work/lws" -B "$work/lws-build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_FLAGS_RELEASE="$c_flags -DNDEBUG" -DCMAKE_INSTALL_PREFIX="$prefix" -DLIB_SUFFIX= "${options[@]}" \
    -DLWS_MBEDTLS_INCLUDE_DIRS="$staged/include" -DLWS_MBEDTLS_LIBRARIES="$staged/lib/libmbedtls.a;$x509" \
    -DMBEDTLS_LIBRARY="$staged/lib/libmbedtls.a;$x509" -DMBEDX509_LIBRARY="$x509" -DMBEDCRYPTO_LIBRARY="$crypto"
  check_lws_probes "$work/lws-build/lws_config.h"
  logged "building libwebsockets" cmake --build "$work/lws-build"
  logged "installing libwebsockets" env DESTDIR="$work/stage" cmake --install "$work/lws-build"
}

# publish: keep headers, archives and licences; the rename makes the prefix appear whole or not at all.
publish() {
  local staged=$work/stage$prefix name kept=$root/deps/tarballs
  for name in mbedtls mbedx509 mbedcrypto everest p256m websockets; do
    [ -s "$staged/lib/lib$name.a" ] || die "lib$name.a was not built; the log is $log"
  done
  rm -rf "$staged/lib/cmake" "$staged/lib/pkgconfig" "$staged/share" "${staged:?}/bin"
  mkdir -p "$staged/licenses" "$kept"
  cp "$work/mbedtls/LICENSE" "$staged/licenses/mbedtls"
  cp "$work/lws/LICENSE" "$staged/licenses/libwebsockets"
  (cd "${lws_tarball%/*}" && sha256sum "${lws_tarball##*/}"; cd "${mbedtls_tarball%/*}" && sha256sum "${mbedtls_tarball##*/}") >"$staged/.complete"
  if [ -z "$tarballs" ]; then cp -f "$lws_tarball" "$mbedtls_tarball" "$kept/" && (cd "$kept" && sha256sum -- *.tar.* >SHA256SUMS); fi
  chmod -R a+rX "$staged"
  rm -rf "$prefix"
  mv "$staged" "$prefix"
}

build_libraries() {
  local started=$SECONDS
  start_log
  check_tools
  work=$(mktemp -d "$root/deps/.build.XXXXXX")
  scratch+=("$work")
  if [ -z "$tarballs" ]; then
    fetch_tarballs
    find_tarballs "$work/tarballs"
  else
    find_tarballs "$tarballs"
  fi
  build_mbedtls
  build_lws
  publish
  done_ "libraries: built in $((SECONDS - started)) s: $prefix"
}

# --- main ---------------------------------------------------------------------------------------------------------------

tarballs='' with_tests='' with_packages=1 rebuild='' packages_to_install=()
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) find_prefix; exit 0 ;;
    --test) with_tests=1 ;;
    --no-packages) with_packages='' ;;
    --rebuild) rebuild=1 ;;
    --tarballs)
      if [ $# -lt 2 ] || [ ! -d "$2" ]; then die "--tarballs needs a folder that exists"; fi
      tarballs=$(cd "$2" && pwd); shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1 (see --help)" ;;
  esac
  shift
done

root=$(cache_root)
mkdir -p "$root/deps" || die "cannot create $root/deps: check the permissions, or set XDG_CACHE_HOME"
chmod a+rx "$root" "$root/deps"
lock "$root/deps/.lock" "Tandem's dependencies"
log=$root/deps/deps.log log_started='' scratch=()
trap '[ ${#scratch[@]} -eq 0 ] || rm -rf "${scratch[@]}"' EXIT

packages=("${build_packages[@]}")
[ -z "$with_tests" ] || packages+=("${test_packages[@]}")
[ -z "$with_packages" ] || install_packages "${packages[@]}"

prefix=$(find_prefix)
if [ -e "$prefix/.complete" ] && [ -z "$rebuild" ]; then
  say "libraries: ready in $prefix"
else
  [ -z "$rebuild" ] || prefix=$root/deps/$(key)
  build_libraries
fi
