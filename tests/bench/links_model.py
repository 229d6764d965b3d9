#!/usr/bin/env python3
"""links_model.py IN.gguf OUT.gguf: a thin copy of a llama model, for paced measurements. Standard library only.

Paced computing takes a fixed time a token and layer only where the real computing takes less. SmolLM2's does not: behind 1,800 tokens a chunk takes longer
than 80 us a token and layer, and a busy machine makes it half as long again. The copy has the same layers, width, KV heads, vocabulary and template, so every
byte on the link is the same; but one query head for each KV head, a feed-forward layer of 64, and nothing but zeros in what these two add to the row: attention
costs a third, products a tenth, and the reply is the prompt's last token, again and again."""
import struct
import sys

FFN = 64
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of metadata's numbers, by type
STRING, ARRAY = 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 30: (1, 2)}  # type: values, bytes; those that 64 divides


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, size):
        self.at += size
        return self.data[self.at - size:self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def string(self):
        return bytes(self.take(self.number("Q")))

    def skip_value(self, kind):
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            of, count = self.number("I"), self.number("Q")
            for _ in range(count if of == STRING else 0):
                self.string()
            self.take(0 if of == STRING else count * SIZES[of])
        else:
            self.take(SIZES[kind])


def thin(name, shape, kind, data, heads, kv_heads):
    """(shape, bytes) of a tensor of the copy; shape as in the file: columns first."""
    values, size = BLOCKS[kind]
    columns, rows = shape[0], shape[1] if len(shape) > 1 else 1
    part = name.split(b".")[-2] if name.startswith(b"blk.") else b""
    width = columns // heads * kv_heads if part == b"attn_output" else FFN if part == b"ffn_down" else columns
    height = rows // heads * kv_heads if part == b"attn_q" else FFN if part in (b"ffn_gate", b"ffn_up") else rows
    if width < columns:
        return [width, height], bytes(height * width // values * size)
    return ([width, height] if len(shape) > 1 else shape), data[:height * width // values * size]


def main(path, out_path):
    r = Reader(memoryview(open(path, "rb").read()))
    magic, version, tensors, pairs = r.number("I"), r.number("I"), r.number("Q"), r.number("Q")
    head, numbers, edits = bytearray(struct.pack("<IIQQ", magic, version, tensors, pairs)), {}, {}
    for _ in range(pairs):
        begin = r.at
        name, kind = r.string(), r.number("I")
        value = r.at
        r.skip_value(kind)
        if kind == 4:
            numbers[name] = struct.unpack("<I", r.data[value:r.at])[0]
            edits[name] = len(head) + value - begin
        head += r.data[begin:r.at]
    heads, kv_heads = numbers[b"llama.attention.head_count"], numbers[b"llama.attention.head_count_kv"]
    struct.pack_into("<I", head, edits[b"llama.attention.head_count"], kv_heads)
    struct.pack_into("<I", head, edits[b"llama.feed_forward_length"], FFN)
    head_dim = numbers[b"llama.embedding_length"] // heads  # told, as it no longer follows from the width
    for name in (b"llama.attention.key_length", b"llama.attention.value_length"):
        head += struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, head_dim)
    struct.pack_into("<Q", head, 16, pairs + 2)
    infos = []
    for _ in range(tensors):
        name, dims = r.string(), r.number("I")
        shape = [r.number("Q") for _ in range(dims)]
        infos.append((name, shape, r.number("I"), r.number("Q")))
    align = numbers.get(b"general.alignment", 32)
    start, body = -(-r.at // align) * align, bytearray()
    for name, shape, kind, offset in infos:
        shape, data = thin(name, shape, kind, r.data[start + offset:], heads, kv_heads)
        if len(shape) == 1:
            data = data[:shape[0] * BLOCKS[kind][1] // BLOCKS[kind][0]]
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, len(body))
        body += data
        body += bytes(-len(body) % align)
    with open(out_path, "wb") as f:
        f.write(head + bytes(-len(head) % align))
        f.write(body)


if __name__ == "__main__":
    main(*sys.argv[1:])
