#!/usr/bin/env python3
"""kv/sealed.bin: kv/raw.piece as a cloud would seal it, from shared/KV_FORMAT.md with hashlib, hmac and the `cryptography` package alone.

Keys, salt and names are simple rules, repeated in tests/unit/shared/test_kv_seal.c. Where a real cloud is random, this one counts.
"""
import hashlib
import hmac
import pathlib
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from check_kv import crc32c

HERE = pathlib.Path(__file__).resolve().parent / "kv"
MASTER = bytes(3 * i + 5 & 255 for i in range(32))
SALT = bytes(7 * i + 1 & 255 for i in range(32))
FINGERPRINT, LAYOUT = bytes([0x5A]) * 32, bytes([0xA5]) * 32


def mac(key, *parts):
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def hkdf(key, salt, info):
    return mac(mac(salt or bytes(32), key), info, b"\x01")


def name_of(tenant, principal, ids):
    """Of the last block of ids."""
    key, parent = mac(hkdf(MASTER, None, b"tandem-seal-names"), tenant, b"\0", principal), bytes(32)
    for at in range(0, len(ids), 64):
        parent = mac(key, parent, FINGERPRINT, LAYOUT, struct.pack("<64I", *ids[at:at + 64]))
    return parent


def main():
    piece = (HERE / "raw.piece").read_bytes()
    payload_size = 32 + 32 + len(piece) + 16
    head = bytearray(piece[:64])
    head[5], head[7] = 14, 0
    head[28:36] = struct.pack("<II", payload_size, 0)
    name = name_of(b"acme", b"ann", range(128))
    is_value, layer = head[6], struct.unpack_from("<H", head, 20)[0]
    key = hkdf(hkdf(MASTER, None, b"tandem-seal-key"), SALT, b"tandem-sealed-piece")
    data = bytes(head) + SALT + name
    body = SALT + name + AESGCM(key).encrypt(struct.pack("<IQ", 2 * layer + is_value, 0), piece, data)
    head[32:36] = struct.pack("<I", crc32c(bytes(head) + body))
    (HERE / "sealed.bin").write_bytes(bytes(head) + body)


if __name__ == "__main__":
    main()
