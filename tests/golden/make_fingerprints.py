#!/usr/bin/env python3
"""Write fingerprints.json: fingerprints of model files, computed as shared/FINGERPRINT.md says by code that shares nothing with Tandem.

    make_fingerprints.py tiny/*.gguf MODEL.gguf > fingerprints.json
"""
import hashlib
import json
import pathlib
import struct
import sys

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144), 13: (256, 176),
          14: (256, 210), 30: (1, 2)}


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, size):
        self.at += size
        return self.data[self.at - size:self.at]

    def number(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self):
        return self.take(self.number("Q"))

    def skip(self, kind):
        if kind == 8:
            self.string()
        elif kind == 9:
            element, count = self.number("I"), self.number("Q")
            for _ in range(count):
                self.skip(element)
        else:
            self.take(SIZES[kind])


def fingerprint(data):
    r = Reader(data)
    assert r.take(4) == b"GGUF" and r.number("I") == 3
    tensor_count, key_count = r.number("Q"), r.number("Q")
    keys, tensors, alignment, arch = {}, {}, 32, None
    for _ in range(key_count):
        begin = r.at
        name, kind, value = r.string(), r.number("I"), r.at
        r.skip(kind)
        keys[name] = data[begin:r.at]
        if name == b"general.architecture":
            arch = data[value + 8:r.at]
        if name == b"general.alignment":
            alignment = struct.unpack("<I", data[value:r.at])[0]
    infos = []
    for _ in range(tensor_count):
        name = r.string()
        dims = [r.number("Q") for _ in range(r.number("I"))]
        infos.append((name, dims, r.number("I"), r.number("Q")))
    start = -(-r.at // alignment) * alignment
    for name, dims, kind, offset in infos:
        values, block_size = BLOCKS[kind]
        size = block_size
        for d in dims:
            size *= d
        content = data[start + offset:start + offset + size // values]
        tensors[name] = (struct.pack("<Q", len(name)) + name + struct.pack("<I4Q", kind, *(dims + [1] * 4)[:4])
                         + hashlib.sha256(content).digest())
    counted = [k for k in sorted(keys) if k == b"general.architecture" or k.startswith((arch + b".", b"tokenizer."))]
    h = hashlib.sha256(b"tandem-fingerprint-v1\0")
    h.update(struct.pack("<Q", len(counted)) + b"".join(keys[k] for k in counted))
    h.update(struct.pack("<Q", len(tensors)) + b"".join(tensors[t] for t in sorted(tensors)))
    return h.hexdigest()


json.dump({pathlib.Path(p).name: fingerprint(pathlib.Path(p).read_bytes()) for p in sys.argv[1:]}, sys.stdout, indent=1)
print()
