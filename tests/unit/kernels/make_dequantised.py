"""Writes dequantised.h: what the `gguf` package makes of blocks of fixed pseudo-random bytes, for test_blocks.c.

usage: make_dequantised.py > dequantised.h     (needs numpy and gguf; tests only read the result)
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

# type, bytes a block, offsets of its f16 fields: those get plain values, random bits could be NaN
TYPES = [(T.Q4_0, 18, [0]), (T.Q4_1, 20, [0, 2]), (T.Q5_0, 22, [0]), (T.Q5_1, 24, [0, 2]), (T.Q8_0, 34, [0]),
         (T.Q4_K, 144, [0, 2]), (T.Q5_K, 176, [0, 2]), (T.Q6_K, 210, [208])]
VALUES = 256


def rows(values, form, per_line):
    text = [form % v for v in values]
    return "\n".join("        " + ", ".join(text[i:i + per_line]) + "," for i in range(0, len(text), per_line))


print("/* Made by make_dequantised.py: blocks of random bytes and the values that the `gguf` package reads in them. */")
print("/* clang-format off */")
print("static const struct {\n    uint32_t type;\n    uint8_t bytes[%d];\n    float values[%d];\n} dequantised[] = {" % (8 * 34, VALUES))
random = np.random.default_rng(2024)
for kind, size, halves in TYPES:
    blocks = VALUES // (256 if size > 100 else 32)
    data = random.integers(0, 256, (blocks, size), dtype=np.uint8)
    for b in range(blocks):
        for at in halves:
            data[b, at:at + 2] = np.frombuffer(np.float16(random.uniform(-2, 2)).tobytes(), np.uint8)
    values = dequantize(data.reshape(1, -1), kind).reshape(-1).astype(np.float32)
    print("    {GGUF_%s, {\n%s\n    }, {\n%s\n    }}," % (kind.name, rows(data.reshape(-1), "%d", 24),
          rows([float(v).hex() + "f" for v in values], "%s", 5)))
print("};\n/* clang-format on */")
