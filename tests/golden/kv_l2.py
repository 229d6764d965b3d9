"""L2 of shared/KV_FORMAT.md, written from that page and apart from Tandem's own code: see check_kv.py.

A row is a list of Python floats that are exact f32 values; f32() after each sum, difference or product of two such gives what
one f32 operation gives (a double has more than twice the bits).
"""
import hashlib
import struct

SIGNS = hashlib.sha512(b"tandem-kv-l2").digest()


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


class Form:
    def __init__(self, heads, tokens, dim, table, wide):
        self.heads, self.tokens, self.dim, self.bits, self.wide = heads, tokens, dim, 4 + table, wide
        self.groups = [range(at, min(at + 64, dim)) for at in range(0, dim, 64)]
        self.low_size = sum(-(-len(g) // 2) for g in self.groups)
        self.fifth_size = sum(-(-len(g) // 8) for g in self.groups) * (self.bits - 4)
        rows = heads * (1 + tokens)
        sizes = (heads * -(-tokens // 8), rows * len(self.groups), rows * self.low_size, rows * self.fifth_size,
                 heads * self.low_size if wide else 0)
        self.parts = [sum(sizes[:i]) for i in range(6)]
        self.size = sum(sizes)

    def row_bits(self, row):
        return self.bits + (4 if self.wide and row == 1 else 0)


def negative(i):
    return SIGNS[i // 8] >> i % 8 & 1


def transform(row, round_up):
    out, left = [], list(row)
    while left:
        k = len(left).bit_length() - 1
        v, left = left[: 1 << k], left[1 << k :]
        for bit in range(k):
            step = 1 << bit
            v = [f32(v[i ^ step] - v[i]) if i & step else f32(v[i] + v[i ^ step]) for i in range(len(v))]
        shift = -(-k // 2) if round_up else k // 2
        out += [x * 2.0**-shift for x in v]
    return out


def encode(f16, form, power):
    """power(n): 2^(n/8) rounded to f32."""
    values = list(struct.unpack(f"<{len(f16) // 2}e", f16))
    reach = {4: 8.375, 5: 16.5, 8: 128.0, 9: 256.0}
    flags, scales, low, fifth, wide = (bytearray() for _ in range(5))

    def put(row, bits):
        for g in form.groups:
            y = [row[i] for i in g]
            peak = max(abs(x) for x in y)
            wanted = f32(peak * f32(1 / reach[bits]))
            s = next((s for s in range(1, 256) if power(s - 120) >= wanted), 255) if peak else 0
            scales.append(s)
            inverse = power(120 - s) if s else 0.0
            q = [round(f32(f32(x * inverse) + (2.0 ** (bits - 1) - 0.5))) for x in y]
            q = [max(0, min(2**bits - 1, x)) for x in q]
            half = -(-len(q) // 2)

            def nibbles(q):
                q = q + [0] * (2 * half - len(q))
                return bytes(q[j] | q[j + half] << 4 for j in range(half))

            if bits > 5:
                wide.extend(nibbles([x & 15 for x in q]))
                q = [x >> 4 for x in q]
            low.extend(nibbles([x & 15 for x in q]))
            if form.bits == 5:
                bits_of = [x >> 4 for x in q] + [0] * 7
                fifth.extend(sum(bits_of[8 * j + b] << b for b in range(8)) for j in range(-(-len(q) // 8)))

    n = form.tokens * form.dim
    for h in range(form.heads):
        rows = [values[h * n + t * form.dim :][: form.dim] for t in range(form.tokens)]
        rows = [transform([-x if negative(i) else x for i, x in enumerate(r)], True) for r in rows]
        mean = [0.0] * form.dim
        for r in rows:
            mean = [f32(m + y) for m, y in zip(mean, r)]
        mean = [f32(m * f32(1 / form.tokens)) for m in mean]
        at = len(scales), len(low), len(fifth)
        put(mean, form.bits)
        mean = get(form, scales[at[0] :], low[at[1] :], fifth[at[2] :], None, power)
        word = 0
        for t, y in enumerate(rows):
            rest = [f32(a - b) for a, b in zip(y, mean)]
            use = max(map(abs, rest)) < max(map(abs, y))
            word |= use << t
            put(rest if use else y, form.row_bits(1 + t))
        flags.extend(word.to_bytes(-(-form.tokens // 8), "little"))
    payload = bytes(flags + scales + low + fifth + wide)
    assert len(payload) == form.size
    return payload


def get(form, scales, low, fifth, wide, power):
    """One row, transformed still; the arguments begin at its own bytes."""
    row, at, at_fifth = [], 0, 0
    for g, s in zip(form.groups, scales):
        half = -(-len(g) // 2)

        def nibbles(data):
            both = [b & 15 for b in data[at : at + half]] + [b >> 4 for b in data[at : at + half]]
            assert not any(both[len(g) :]), "L2: padding"
            return both[: len(g)]

        q, bits = nibbles(low), form.bits
        if form.bits == 5:
            data = int.from_bytes(fifth[at_fifth : at_fifth + -(-len(g) // 8)], "little")
            assert data >> len(g) == 0, "L2: padding"
            q = [x + 16 * (data >> i & 1) for i, x in enumerate(q)]
        if wide is not None:
            q, bits = [16 * x + w for x, w in zip(q, nibbles(wide))], bits + 4
        step = power(s - 120) if s else 0.0
        row += [f32((x - (2.0 ** (bits - 1) - 0.5)) * step) + 0.0 for x in q]
        at, at_fifth = at + half, at_fifth + -(-len(g) // 8)
    return row


def decode(payload, form, power):
    assert len(payload) == form.size, "L2: wrong size"
    flags, scales, low, fifth, wide = (payload[a:b] for a, b in zip(form.parts, form.parts[1:]))
    out = b""
    for h in range(form.heads):
        size = -(-form.tokens // 8)
        word = int.from_bytes(flags[h * size : (h + 1) * size], "little")
        assert word >> form.tokens == 0, "L2: padding"
        for r in range(1 + form.tokens):
            i = h * (1 + form.tokens) + r
            y = get(form, scales[i * len(form.groups) :], low[i * form.low_size :], fifth[i * form.fifth_size :],
                    wide[h * form.low_size :] if form.row_bits(r) > 5 else None, power)
            if r == 0:
                mean = y
                continue
            if word >> (r - 1) & 1:
                y = [f32(a + b) for a, b in zip(y, mean)]
            y = [-x if negative(i) else x for i, x in enumerate(transform(y, False))]
            out += struct.pack(f"<{form.dim}e", *(max(-65504.0, min(65504.0, x)) for x in y))
    return out
