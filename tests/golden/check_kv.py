#!/usr/bin/env python3
"""An encoder and decoder of KV pieces written from shared/KV_FORMAT.md, apart from Tandem's own.

    check_kv.py            check every piece in kv/ against the values beside it (L0 needs the module zstandard; L2 is in kv_l2.py)
    check_kv.py FILE...    print the head of pieces and the first values
    check_kv.py --make     write kv/ anew

A piece NAME.piece belongs to values in NAME.f16 (what it decodes to); NAME.src.f16, where present, is what it was made from.
It also computes the constants of shared/kv_l1.c again, with exact integers.
"""
import pathlib
import random
import struct
import sys
from fractions import Fraction
from functools import lru_cache

import kv_l2

HERE = pathlib.Path(__file__).resolve().parent / "kv"
HEAD = struct.Struct("<IBBBB4BIHHHHHHII28s")
L0, L1, L2, RAW = 0, 1, 2, 15


def crc32c(data):
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def floats(f16):
    return list(struct.unpack(f"<{len(f16) // 2}e", f16))


@lru_cache(None)
def power(eighths):
    """2^(eighths/8) rounded to f32: the integer nearest to 2^(k/8) * 2^23, found without floating point."""
    octave, step = divmod(eighths, 8)
    target = Fraction(2) ** (step + 8 * 23)
    low, high = 1 << 23, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        if Fraction(middle) ** 8 <= target:
            low = middle
        else:
            high = middle
    if Fraction(2 * low + 1, 2) ** 8 < target:
        low += 1
    return float(Fraction(low, 1 << 23) * Fraction(2) ** octave)


def scale_index(largest):
    if largest == 0:
        return 0
    target = Fraction(largest) ** 8
    for s in range(1, 256):
        if Fraction(127) ** 8 * Fraction(2) ** (s - 183) >= target:
            return s
    return 255


def l1_encode(f16, table=0):
    values = floats(f16)
    scales, qs = bytearray(), bytearray()
    step = 64 << table
    for at in range(0, len(values), step):
        group = values[at : at + step]
        s = scale_index(max(abs(x) for x in group))
        scales.append(s)
        for x in group:
            q = round(f32(x * power(183 - s))) if s else 0
            qs.append(max(-127, min(127, q)) & 255)
    return bytes(scales + qs)


def l1_decode(payload, count, table):
    groups = -(-count // (64 << table))
    assert len(payload) == groups + count, "L1: wrong size"
    out = b""
    for i, q in enumerate(struct.unpack(f"<{count}b", payload[groups:])):
        assert q != -128, "L1: -128"
        s = payload[i // (64 << table)]
        out += struct.pack("<e", f32(q * power(s - 183)) + 0.0) if s else b"\0\0"
    return out


def l0_decode(payload, count):
    import zstandard

    high_form, low_form, zero, high_size = struct.unpack_from("<BBHI", payload)
    assert zero == 0 and high_form <= 1 and low_form <= 1

    def plane(form, data):
        if form == 1:
            assert zstandard.frame_content_size(data) == count
            data = zstandard.ZstdDecompressor().decompress(data)
        assert len(data) == count, "L0: wrong size"
        return data

    high, low = plane(high_form, payload[8 : 8 + high_size]), plane(low_form, payload[8 + high_size :])
    return bytes(b for pair in zip(low, high) for b in pair)


def l0_encode(f16, shrink_low):
    import zstandard

    planes = []
    for data, shrink in ((f16[1::2], True), (f16[0::2], shrink_low)):
        small = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=True).compress(data)
        planes.append((1, small) if shrink and len(small) < len(data) else (0, data))
    return struct.pack("<BBHI", planes[0][0], planes[1][0], 0, len(planes[0][1])) + planes[0][1] + planes[1][1]


def piece(codec, payload, shape, block_index=5, first=0, layer=7, is_value=0, quality=None, table=0):
    heads, count, dim = shape
    quality = quality or (codec if codec < RAW else 0, 1, 0, 0)

    def head(crc):
        return HEAD.pack(0x4B564454, 1, codec, is_value, table, *quality, block_index, first, count, layer, heads, dim, 0,
                         len(payload), crc, bytes(28))

    return head(crc32c(head(0) + payload)) + payload


def parse(data):
    fields = HEAD.unpack_from(data)
    assert fields[0] == 0x4B564454 and fields[1] == 1 and fields[4] <= (fields[2] in (L1, L2)) and fields[15] == 0 and fields[18] == bytes(28)
    payload = data[64:]
    assert fields[16] == len(payload), "wrong size"
    assert fields[17] == crc32c(data[:32] + bytes(4) + data[36:]), "wrong checksum"
    names = "codec is_value table quality block_index first_token token_count layer kv_head_count head_dim"
    values = (fields[2], fields[3], fields[4], fields[5:9], *fields[9:15])
    return dict(zip(names.split(), values)), payload


def l2_form(head):
    return kv_l2.Form(head["kv_head_count"], head["token_count"], head["head_dim"], head["table"],
                      head["block_index"] == 0 and head["first_token"] == 0)


def decode(data):
    head, payload = parse(data)
    count = head["token_count"] * head["kv_head_count"] * head["head_dim"]
    if head["codec"] == RAW:
        assert len(payload) == 2 * count
        return payload
    if head["codec"] == L2:
        return kv_l2.decode(payload, l2_form(head), power)
    return l1_decode(payload, count, head["table"]) if head["codec"] == L1 else l0_decode(payload, count)


def sample_values():
    """2 heads, 64 tokens, 16 dimensions: noise of many sizes, and groups that are hard for L1."""
    rng = random.Random(20240607)
    values = [rng.gauss(0, 2.0 ** rng.choice([-12, -4, 0, 0, 3])) for _ in range(2048)]
    values[0:64] = [0.0] * 64
    values[5] = -0.0
    values[64:128] = [k * 2.0**-24 for k in range(-32, 32)]  # subnormals
    values[128:192] = [k / 2 * 2.0**-7 for k in range(-31, 33)]  # ties, when the scale is a power of two
    values[190] = 127 * 2.0**-7  # which this makes it
    values[192], values[193], values[194] = 65504.0, -65504.0, 65024.0
    values[256:320] = [1e-7] * 64
    values[320:384] = [-127.0] + [1.0] * 63
    return b"".join(struct.pack("<e", v) for v in values)


def l2_values(heads, tokens, dim, seed):
    """Rows about a mean, one that is nothing like it, an empty one, and single huge and tiny values."""
    rng = random.Random(seed)
    out = []
    for _ in range(heads):
        mean = [rng.gauss(0, 4) for _ in range(dim)]
        rows = [[m + rng.gauss(0, 1) for m in mean] for _ in range(tokens)]
        rows[0] = [rng.gauss(0, 0.01) for _ in range(dim)]
        rows[-1] = [0.0] * dim
        rows[1][dim // 2], rows[2 % tokens][0] = 65504.0, -(2.0**-24)
        out += [x for row in rows for x in row]
    return b"".join(struct.pack("<e", x) for x in out)


def make_l2():
    for name, shape, extra, seed in (
        ("l2", (2, 12, 128), {}, 1),
        ("l2_first", (1, 9, 64), {"block_index": 0, "is_value": 1}, 2),
        ("l2_5bit", (1, 16, 64), {"table": 1, "first": 40, "quality": (2, 2, 1, 0)}, 3),
        ("l2_5bit_first", (2, 9, 80), {"table": 1, "block_index": 0}, 4),
        ("l2_odd", (2, 3, 31), {"first": 61}, 5),
        ("l2_odd_first", (1, 3, 31), {"block_index": 0, "table": 1, "quality": (3, 1, 0, 0)}, 6),
    ):
        src = l2_values(*shape, seed)
        head = {"block_index": 5, "first": 0, "table": 0, **extra}
        form = kv_l2.Form(*shape, head["table"], head["block_index"] == 0 and head["first"] == 0)
        data = piece(L2, kv_l2.encode(src, form, power), shape, **extra)
        (HERE / f"{name}.piece").write_bytes(data)
        (HERE / f"{name}.f16").write_bytes(decode(data))
        (HERE / f"{name}.src.f16").write_bytes(src)


def make():
    HERE.mkdir(exist_ok=True)
    src = sample_values()
    bf16_like = b"".join(struct.pack("<BB", v & 0xE0, v >> 8) for v in struct.unpack("<2048H", src))
    tail = src[400 : 400 + 2 * 90]
    shape = (2, 64, 16)
    for name, codec, values, size, extra in (
        ("raw", RAW, src, shape, {"is_value": 1}),
        ("l0", L0, src, shape, {"quality": (1, 2, 1, 0)}),
        ("l0_even", L0, bf16_like, shape, {}),
        ("l1", L1, src, shape, {}),
        ("l1_tail", L1, tail, (1, 3, 30), {"block_index": 4000000000, "first": 61, "layer": 1023, "quality": (1, 3, 1, 0)}),
        ("l1_wide", L1, src, shape, {"table": 1}),
        ("l1_wide_tail", L1, src[400 : 400 + 2 * 300], (2, 5, 30), {"table": 1}),
    ):
        payload = l0_encode(values, name == "l0_even") if codec == L0 else l1_encode(values, extra.get("table", 0)) if codec == L1 else values
        data = piece(codec, payload, size, **extra)
        (HERE / f"{name}.piece").write_bytes(data)
        (HERE / f"{name}.f16").write_bytes(decode(data))
        if codec == L1:
            (HERE / f"{name}.src.f16").write_bytes(values)
    make_l2()
    scales = b"".join(struct.pack("<f", power(s - 183) if s else 0.0) for s in range(256))
    (HERE / "scales.f32").write_bytes(scales)


def check():
    for path in sorted(HERE.glob("*.piece")):
        data = path.read_bytes()
        assert decode(data) == path.with_suffix(".f16").read_bytes(), f"{path.name}: values differ"
        src = path.with_suffix(".src.f16")
        if src.exists():
            head, f16 = parse(data)[0], src.read_bytes()
            again = kv_l2.encode(f16, l2_form(head), power) if head["codec"] == L2 else l1_encode(f16, head["table"])
            assert again == data[64:], f"{path.name}: encodes differently"
        print("ok", path.name)
    # The constants in shared/kv_l1.c.
    index_of_one = [scale_index(Fraction(1024 + m, 1024)) for m in range(1024)]
    print("limits", [max(m for m in range(1024) if index_of_one[m] <= 128 + j) for j in range(8)])
    print("mantissas", [hex(int(power(k) * 2**23) - 2**23) for k in range(8)])


def main():
    if sys.argv[1:] == ["--make"]:
        make()
    elif sys.argv[1:]:
        for name in sys.argv[1:]:
            data = pathlib.Path(name).read_bytes()
            print(name, parse(data)[0], floats(decode(data))[:8])
    else:
        check()


if __name__ == "__main__":
    main()
