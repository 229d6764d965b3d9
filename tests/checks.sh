#!/usr/bin/env bash
# checks.sh: what no compiler says. Format, static analysis, the arrows between folders, words that do not belong.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }

mapfile -t sources < <(git ls-files '*.c' '*.h' 2>/dev/null || find shared kernels protocol store edge cloud cli tests -name '*.[ch]')

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

long_files=$(git ls-files 'shared/*.[ch]' 'kernels/*.[ch]' 'protocol/*.[ch]' 'store/*.[ch]' 'edge/*.[ch]' 'cloud/*.[ch]' 'cli/*.[ch]' |
  grep -v table | xargs wc -l | awk '$2 != "total" && $1 > 800 {print $2 " (" $1 " lines)"}')
[ -z "$long_files" ] || fail "over 800 lines: $long_files"

unfinished=$(git grep -nE '\b(TODO|FIXME|XXX)\b' -- '*.c' '*.h' '*.sh' ':!tests/checks.sh' ':!deploy/test.sh' || true)
[ -z "$unfinished" ] || fail "unfinished: $unfinished"

echo "cppcheck"
mapfile -t product < <(git ls-files 'shared/*.c' 'kernels/*.c' 'protocol/*.c' 'store/*.c' 'edge/*.c' 'cloud/*.c' 'cli/*.c')
cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=1 -j "$(nproc)" -I . \
  --suppressions-list=tests/cppcheck.supp "${product[@]}" || fail "cppcheck"

echo "$failures failures"
[ "$failures" -eq 0 ]
