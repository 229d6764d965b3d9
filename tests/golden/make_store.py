#!/usr/bin/env python3
"""A store directory of version 1, from store/FORMAT.md and shared/KV_FORMAT.md with hashlib, hmac and the `cryptography` package alone.

    make_store.py DIRECTORY      (store/v1; the same bytes each time)

Names, keys, salts and contents are simple rules, repeated in tests/unit/store/test_golden.c. Where a real store is random, this one counts.
"""
import hashlib
import hmac
import os
import struct
import sys

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PAGE = 4096
BLOCK, CONVERSATION, TOMBSTONE, PIN, SEAL, VOID = range(1, 7)
MASTER = bytes(3 * i + 5 & 255 for i in range(32))
TIME = 1_700_000_000_000_000


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def mac(key, *parts):
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def hkdf(key, salt, info):
    return mac(mac(salt or bytes(32), key), info, b"\x01")


def gcm(key, index, plain, data):
    """Cipher text and tag."""
    return AESGCM(key).encrypt(struct.pack("<IQ", index, 0), plain, data)


CRC_TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    CRC_TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def checked(page):
    """A page whose last four bytes are the checksum of the others."""
    assert len(page) == PAGE - 4
    return page + struct.pack("<I", crc32c(page))


class Tenant:
    def __init__(self, name):
        self.name = name
        self.key_id = sha(b"key id", name)[:16]
        self.data_key = sha(b"data key", name)
        self.chain_key = sha(b"chain key", name)

    def entry(self):
        salt = sha(b"entry salt", self.name)
        plain = struct.pack("<I", len(self.name)) + self.name
        plain = plain.ljust(96, b"\0") + self.data_key + self.chain_key
        wrap = hkdf(MASTER, salt, b"tandem-keys-wrap" + self.key_id)
        return self.key_id + salt + gcm(wrap, 0, plain, self.key_id) + bytes(32)


def keys_file(tenants):
    salt = sha(b"file salt")
    data = b"TDKEYS\0\0" + struct.pack("<IIQQ", 1, len(tenants), 7, 0) + salt + hkdf(MASTER, salt, b"tandem-keys-check")
    data += b"".join(t.entry() for t in tenants)
    data += mac(hkdf(MASTER, salt, b"tandem-keys-mac"), data)
    return data + struct.pack("<I", crc32c(data))


def block_id(seed):
    return sha(b"block", bytes([seed]))


def piece(seed, layer, is_value, quality, codec):
    """One head of two dimensions: 128 values, RAW, or L1 in two groups of 64."""
    size = {15: 256, 1: 130}[codec]
    payload = bytes((31 * seed + 7 * layer + 3 * is_value + i) % 127 for i in range(size))
    head = struct.pack("<I", 0x4B564454)
    head += bytes([1, codec, is_value, 0]) + quality + struct.pack("<IHHHHHHI", seed, 0, 64, layer, 1, 2, 0, size)
    crc = crc32c(head + bytes(32) + payload)
    return head + struct.pack("<I", crc) + bytes(28) + payload


class Segment:
    def __init__(self, number, lsn):
        self.number, self.lsn, self.sequence, self.synced = number, lsn, 0, PAGE
        self.nonce = int.from_bytes(sha(b"nonce", bytes([number]))[:8], "little")
        head = b"TDSEGMNT" + struct.pack("<IIQQQQ", 1, 0, number, self.nonce, TIME, lsn)
        self.bytes = checked(head.ljust(PAGE - 4, b"\0"))

    def sync(self):
        """What is written from here on knows that all before it was synced."""
        self.synced = len(self.bytes)

    def record(self, kind, tenant=None, name=bytes(32), parent=bytes(32), codec=0, target=0, quality=bytes(4), index=0,
               layers=(0, 0), version=0, parts=(), torn=False, hole=0):
        salt = bytes(32) if kind == VOID else sha(b"salt", struct.pack("<Q", self.lsn))
        key_id = tenant.key_id if tenant else bytes(16)
        size = sum(len(a) + len(b) + 16 for a, b in parts) or hole
        head = b"TDRC" + bytes([1, kind, codec, target])
        head += struct.pack("<QQQIIQQQ", self.lsn, self.number, self.nonce, self.sequence, len(parts), len(self.bytes), size,
                            0 if kind == VOID else self.synced)
        head += key_id + name + parent + salt + quality
        head += struct.pack("<IHHIQQ", index, *layers, 0, version, 0 if kind == VOID else TIME + self.lsn)
        assert len(head) == 208
        key = hkdf(tenant.data_key, salt, b"tandem-record" + bytes([kind, codec]) + name) if tenant else None
        if kind == CONVERSATION:
            body_key = sha(b"body key", salt)
            head += gcm(key, 0, body_key, head)
            key = body_key
        head = head.ljust(256, b"\0") + b"".join(struct.pack("<II", len(a), len(b)) for a, b in parts)
        body = b"".join(gcm(key, layers[0] + i, a + b, head) for i, (a, b) in enumerate(parts)) or bytes(hole)
        head = checked(head.ljust(PAGE - 8, b"\0") + struct.pack("<I", 0 if kind == VOID else crc32c(body)))
        if torn:
            body = body[:512].ljust(size, b"\0")
        self.bytes += head + body + bytes(-size % PAGE)
        self.lsn += 1
        self.sequence += 1

    def block(self, tenant, seed, quality=bytes([0, 1, 0, 0]), codec=15, layers=(0, 2), torn=False):
        parts = [tuple(piece(seed, n, v, quality, codec) for v in (0, 1)) for n in range(*layers)]
        self.record(BLOCK, tenant, block_id(seed), block_id(seed - 1) if seed > 1 else bytes(32), codec % 15, 0, quality,
                    seed, layers, parts=parts, torn=torn)

    def conversation(self, tenant, principal, name, version, text):
        names = hkdf(tenant.data_key, b"", b"tandem-conversation-id")
        who = struct.pack("<H", len(principal)) + principal
        plain = struct.pack("<H", len(name)) + name + who + text
        self.record(CONVERSATION, tenant, mac(names, b"conversation", who, name), mac(names, b"principal", who), version=version,
                    parts=[(plain, b"")])

    def delete(self, tenant, target, name):
        self.record(TOMBSTONE, tenant, name, target=target, version=self.lsn)


def conversation_name(tenant, principal, name):
    names = hkdf(tenant.data_key, b"", b"tandem-conversation-id")
    return mac(names, b"conversation", struct.pack("<H", len(principal)), principal, name)


def segments(acme, labs, gone):
    one = Segment(1, 1)
    one.block(acme, 1)
    one.block(acme, 2)
    one.conversation(acme, b"ann", b"trip", 1, b"version one")
    one.sync()
    one.conversation(acme, b"ann", b"trip", 2, b"version two")
    one.conversation(acme, b"bob", b"tax", 1, b"deleted in the next segment")
    one.delete(acme, BLOCK, block_id(2))
    one.record(PIN, acme, block_id(1), target=BLOCK)
    one.record(VOID, hole=100)
    one.block(labs, 3, bytes([1, 1, 1, 0]), 1, (1, 3))
    one.block(gone, 4)
    one.sync()
    one.record(SEAL)
    two = Segment(2, one.lsn)
    two.delete(acme, CONVERSATION, conversation_name(acme, b"bob", b"tax"))
    two.block(acme, 5)
    two.sync()
    two.block(acme, 6)
    two.block(acme, 7, torn=True)
    return [one, two]


def main():
    out = sys.argv[1]
    acme, labs, gone = (Tenant(n) for n in (b"acme", b"labs", b"gone"))
    os.makedirs(out, exist_ok=True)
    files = {"keys.td": keys_file([acme, labs])}
    files.update({f"seg-{s.number:016x}.td": s.bytes for s in segments(acme, labs, gone)})
    for name, data in files.items():
        with open(os.path.join(out, name), "wb") as f:
            f.write(data)


if __name__ == "__main__":
    main()
