#!/usr/bin/env python3
"""Write unicode_class_table.h: the class of every code point as the pre-tokenizers see it.

The classes are fixed to Unicode 15.1, whatever the system's libraries know: two machines that disagree about a letter
would cut the same text into different tokens. Run with the package unicodedata2 == 15.1.0:

    python3 shared/unicode_class.py > shared/unicode_class_table.h
"""
import unicodedata2 as ucd

assert ucd.unidata_version == "15.1.0", ucd.unidata_version

OTHER, LETTER, NUMBER, SPACE = range(4)
# White_Space of PropList.txt; Python's str.isspace() also counts the separators U+001C to U+001F, which \s does not.
SPACES = {*range(0x9, 0xE), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def class_of(cp):
    if cp in SPACES:
        return SPACE
    return {"L": LETTER, "N": NUMBER}.get(ucd.category(chr(cp))[0], OTHER)


runs = []
for cp in range(0x110000):
    c = class_of(cp)
    if not runs or runs[-1] & 3 != c:
        runs.append(cp << 2 | c)

print("/* Made by unicode_class.py from Unicode 15.1; do not edit. First code point << 2 | class of each run. */")
print("/* clang-format off */")
print(f"static const uint32_t unicode_runs[{len(runs)}] = {{")
for i in range(0, len(runs), 10):
    print("    " + " ".join(f"0x{r:06x}," for r in runs[i:i + 10]))
print("};")
print("/* clang-format on */")
