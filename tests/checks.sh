#!/usr/bin/env bash
# checks.sh: what no compiler says. Format, static analysis, the arrows between folders, long files, tests, files and constants that documents name.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }

product_folders=(shared kernels protocol store edge cloud cli)
mapfile -t sources < <(find "${product_folders[@]}" tests -name '*.[ch]' | sort)
mapfile -t product < <(find "${product_folders[@]}" -name '*.c' | sort)

echo "format: ${#sources[@]} files"
clang-format --dry-run -Werror "${sources[@]}" || fail "format: run clang-format -i on the files above"

# shared <- {kernels, protocol, store} <- {edge, cloud, cli}; folders of one floor never include each other.
declare -A may=([shared]='shared' [kernels]='shared kernels' [protocol]='shared protocol' [store]='shared store'
  [edge]='shared kernels protocol store edge' [cloud]='shared kernels protocol store cloud' [cli]='shared kernels protocol store cli')
for folder in "${!may[@]}"; do
  while IFS=: read -r file line include; do
    target=$(sed -E 's/.*"([a-z]+)\/.*/\1/' <<<"$include")
    [[ " ${may[$folder]} " == *" $target "* ]] || fail "$file:$line includes $target/; $folder may include: ${may[$folder]}"
  done < <(grep -rnE '^#include "(shared|kernels|protocol|store|edge|cloud|cli)/' "$folder" --include='*.[ch]')
done

long_files=$(find "${product_folders[@]}" tests \( -name '*.[ch]' -o -name '*.cu' \) ! -name '*table*' -print0 | xargs -0 wc -l | awk '$2 != "total" && $1 > 800 {print $2 " (" $1 " lines)"}')
[ -z "$long_files" ] || fail "over 800 lines: $long_files"

for reference in $(grep -ohE 'tests/[a-z0-9_/]+\.(c|py)::?[a-z0-9_]+' ./*.md tests/*.md | sort -u); do
  grep -qsE "\b${reference##*:}\(" "${reference%%:*}" || fail "no test $reference, which a document names"
done

for path in $(grep -ohE '`('"$(IFS='|'; echo "${product_folders[*]}")"'|tests|deploy)/[A-Za-z0-9_./-]+\.[a-z0-9]+`' ./*.md tests/*.md tests/bench/*.md | tr -d '`' | sort -u); do
  [ -e "$path" ] || fail "no file $path, which a document names"
done
for name in $(grep -ohE '`[A-Z]+_[A-Z0-9_]+`' ARCHITECTURE.md | tr -d '`' | sort -u); do
  grep -rqw --include='*.[ch]' --include='*.sh' -e "$name" "${product_folders[@]}" deploy tests || fail "nothing is called $name, as ARCHITECTURE.md says"
done

unfinished=$(grep -rnE '\b(TODO|FIXME)\b' --include='*.c' --include='*.h' --include='*.cu' "${product_folders[@]}" tests || true)
[ -z "$unfinished" ] || fail "unfinished: $unfinished"

echo "cppcheck"
cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 -j "$(nproc)" -I . \
  --suppressions-list=tests/cppcheck.supp "${product[@]}" || fail "cppcheck"

echo "$failures failures"
[ "$failures" -eq 0 ]
