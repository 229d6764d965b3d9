#!/usr/bin/env python3
"""Golden vectors of block ids and message histories: kv/ids.txt, from shared/KV_FORMAT.md and store/conversation.h with hashlib
and hmac alone.

    make_ids.py > kv/ids.txt

Inputs are simple rules, repeated in tests/unit/shared/test_kv_block.c and tests/unit/store/test_conversation.c:
    key byte i = 7 i + 1, fingerprint = SHA-256("fingerprint"), token id i of block b = (64 b + i) * 2654435761 mod 49152
"""
import hashlib
import hmac
import struct


def sha(data):
    return hashlib.sha256(data).digest()


def layout_hash(rope_kind, rope_dim, base, scale, factors, adapter):
    fields = struct.pack("<IIII", 64, 1, rope_kind, rope_dim) + struct.pack("<ff", base, scale)
    return sha(b"tandem-kv-layout" + fields + factors + adapter + struct.pack("<I", 1))


def hkdf(key, info):
    """RFC 5869 without salt, one block of output."""
    prk = hmac.new(bytes(32), key, hashlib.sha256).digest()
    return hmac.new(prk, info + b"\x01", hashlib.sha256).digest()


def tokens(block):
    return [(64 * block + i) * 2654435761 % 49152 for i in range(64)]


def block_id(key, parent, fingerprint, layout, ids):
    data = parent + fingerprint + layout + b"".join(struct.pack("<I", t) for t in ids)
    return hmac.new(key, data, hashlib.sha256).digest()


def history(key, kind, messages):
    h = hmac.new(key, b"tandem-history" + bytes([kind]), hashlib.sha256).digest()
    yield h
    for role, content in messages:
        data = h + struct.pack("<I", len(role)) + role + struct.pack("<I", len(content)) + content
        h = hmac.new(key, data, hashlib.sha256).digest()
        yield h


def main():
    zeros = bytes(32)
    key = bytes((7 * i + 1) & 255 for i in range(32))
    fingerprint = sha(b"fingerprint")
    plain = layout_hash(0, 64, 10000.0, 1.0, zeros, zeros)
    scaled = layout_hash(1, 128, 500000.0, 8.0, sha(b"factors"), sha(b"adapter"))
    alice = hkdf(key, b"tandem-own" + b"alice")
    vectors = {"layout_plain": plain, "layout_scaled": scaled, "principal_alice": alice}
    parent = zeros
    for b in range(3):
        parent = block_id(key, parent, fingerprint, plain, tokens(b))
        vectors[f"shared_{b}"] = parent
    vectors["own_0"] = block_id(alice, zeros, fingerprint, plain, tokens(0))
    vectors["scaled_0"] = block_id(key, zeros, fingerprint, scaled, tokens(0))
    messages = [(b"system", b"Be brief."), (b"user", "Gr\u00fc\u00df dich\n".encode()), (b"assistant", b"")]
    for i, value in enumerate(history(key, 3, messages)):
        vectors[f"history_{i}"] = value
    for name, value in vectors.items():
        print(name, value.hex())


if __name__ == "__main__":
    main()
