#!/usr/bin/env python3
"""Golden frames of tandem.v1, one file a type, into tests/golden/wire/.

Encodes by hand from the tables in protocol/WIRE.md and the field numbers in protocol/tandem.proto, so that neither
protobuf-c nor Tandem's own code has a part in it. Run it only when a new frame type or field is added: existing files
never change.
"""
import os
import struct

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wire")


def varint(n):
    out = b""
    while n >= 0x80:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def field(number, value):
    """A proto3 field by the type of its value; defaults are left out."""
    if isinstance(value, (bytes, str)):
        raw = value.encode() if isinstance(value, str) else value
        return varint(number << 3 | 2) + varint(len(raw)) + raw if raw else b""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value) if value else b""
    value = int(value)
    return varint(number << 3) + varint(value & 0xFFFFFFFFFFFFFFFF) if value else b""


def message(number, raw):
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def fields(*values):
    """Fields 1, 2, 3, … in order; None is left out."""
    return b"".join(field(i + 1, v) for i, v in enumerate(values) if v is not None)


def frame(name, kind, stream, header, payload=b"", flags=0):
    head = struct.pack("<BBHIII", kind, flags, len(header), stream, len(payload), 0)
    with open(os.path.join(HERE, name + ".bin"), "wb") as out:
        out.write(head + header + payload)


def ids(*values):
    return struct.pack("<%dI" % len(values), *values)


def hash_of(first):
    return bytes((first + i) & 0xFF for i in range(32))


def main():
    os.makedirs(HERE, exist_ok=True)
    version = fields(1, hash_of(0x10), 1)
    hello = (message(1, version) + message(1, fields(1, hash_of(0x11), 2)) +
             b"".join(field(n, v) for n, v in
                      [(2, hash_of(0x20)), (3, 30), (4, 8), (5, 0x8003), (6, 7), (7, "secret"), (8, "edge/1"),
                       (9, 8 << 20), (10, 2 << 20)]))
    frame("hello", 1, 0, hello)
    frame("hello_future", 1, 0, hello + field(1000, 7) + field(1001, "unknown") + message(1002, version))
    frame("welcome", 2, 0, message(1, version) + b"".join(
        field(n, v) for n, v in [(2, "acme"), (3, "ann"), (4, hash_of(0x30)), (5, 1 << 40), (6, 8 << 20), (7, 2 << 20),
                                 (8, 64), (9, 8192), (10, 3), (11, 7), (12, "node-1:7000")]))
    frame("welcome_seal", 2, 0, message(1, version) + b"".join(
        field(n, v) for n, v in [(2, "acme"), (3, "ann"), (4, hash_of(0x30)), (13, 1), (14, hash_of(0x40)[:16])]))
    frame("open", 3, 1, fields(bytes(range(16)), 1700000000000, "conv", 2, hash_of(0x40), 4, 2, hash_of(0x50), 1, True),
          ids(300, 4, 5, 70000))
    frame("open_private", 3, 1, fields(bytes(range(16)), 1700000000000, None, None, None, 130, 2, hash_of(0x50), 1) + field(12, True) +
          field(13, hash_of(0x60)), hash_of(0x70) + hash_of(0x80) + ids(300, 70000))
    frame("open_ack", 4, 1, fields(1700000000000, False, 128, 64, 64, 2, True, 1500, 900, 4096))
    edge_range = fields(0, 128, 8, 1, 1)
    cloud_range = fields(128, 37)
    frame("plan", 5, 1, field(1, 2) + message(2, edge_range) + message(2, cloud_range))
    frame("hidden", 6, 1, fields(2, 64, 3, 8, 1, 100, 200), bytes(range(100)))
    frame("kv_block", 7, 1, fields(2, 1, 7, True, 0, 10), bytes(range(10)))
    frame("ingested", 8, 1, fields(2, 192, 128, 5000000000))
    frame("need", 9, 1, fields(2, 64, 64, 3, 8, True))
    frame("fetch", 10, 1, fields(5, 2, 8))
    frame("fetch_ids", 10, 3, fields(0, 2, 8, 1), ids(*range(1000, 1064)))
    generate = (fields(100, 0.75, 40, 0.95, 0.05, 1.125, -1, 0.5, 0.25) +
                varint(10 << 3 | 1) + struct.pack("<Q", 0x0123456789ABCDEF) +
                b"".join(field(n, v) for n, v in [(11, True), (12, 5), (13, True), (14, True)]))
    frame("generate", 11, 1, generate, struct.pack("<ifif", 7, -100.0, 50256, 1.5))
    logprobs = (field(1, -0.5) + message(2, varint(7) + varint(300)) +
                message(3, struct.pack("<2f", -0.5, -2.0)))
    frame("token", 12, 1, fields(1700000000000, 9) + message(3, logprobs), ids(70000))
    timings = fields(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    frame("done", 13, 1, fields(1700000000000, 1, 165, 10, 128) + message(6, timings))
    frame("cancel", 14, 1, fields(True, 12))
    frame("credit", 15, 1, fields(524288))
    frame("ping", 16, 0, fields(77, True))
    frame("error", 17, 1, fields(20, "busy", True, 2500))
    frame("goaway", 18, 0, fields("node-2:7000", "drain"))
    frame("unknown_optional", 200, 5, b"\x08\x01", b"later", flags=1)


main()
