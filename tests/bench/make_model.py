"""Writes a complete `llama` model with random weights of one type, so that speed can be measured on shapes and
types for which there is no small file at hand.

usage: make_model.py --out FILE.gguf [--type q4_k] [--width 2048] [--ffn 8192] [--layers 8] [--vocabulary 32768]
needs: numpy gguf

Speed depends on shape and type, not on values; but values must be finite and look like a model's, so quantised
blocks are random bits with factors that give mean 0 and a deviation of about 1 / sqrt(columns). The same arguments
give the same file. Keep it out of the repository: it may be a gigabyte.
"""

import argparse
import os
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

HEAD_DIM, GROUP, CONTEXT = 64, 4, 8192
NORMAL, CONTROL, UNUSED = 1, 3, 5
ROWS_AT_ONCE = 1024

# type: values and bytes of a block; where its f16 factor lies; deviation of a value with factor 1; and of types with a
# minimum where that lies, and its value in units of the factor that makes the mean 0.
BLOCKS = {Q.Q4_0: (32, 18, 0, 4.6, None, 0), Q.Q4_1: (32, 20, 0, 4.6, 2, -7.5), Q.Q5_0: (32, 22, 0, 9.2, None, 0),
          Q.Q5_1: (32, 24, 0, 9.2, 2, -15.5), Q.Q8_0: (32, 34, 0, 74.0, None, 0), Q.Q4_K: (256, 144, 0, 265.0, 2, 7.5),
          Q.Q5_K: (256, 176, 0, 535.0, 2, 15.5), Q.Q6_K: (256, 210, 208, 1370.0, None, 0)}
KINDS = [Q.F32, Q.F16, Q.BF16, *BLOCKS]


def put_f16(blocks, at, values):
    blocks[:, at:at + 2] = values.reshape(-1, 1).astype("<f2").view(np.uint8)


def quantised(rng, kind, rows, columns):
    values, size, factor_at, deviation, minimum_at, minimum = BLOCKS[kind]
    blocks = np.frombuffer(rng.bytes(rows * columns // values * size), np.uint8).reshape(-1, size).copy()
    factor = rng.uniform(0.7, 1.3, len(blocks)) / (np.sqrt(columns) * deviation)
    put_f16(blocks, factor_at, factor)
    if minimum_at is not None:
        put_f16(blocks, minimum_at, factor * minimum)
    return blocks.reshape(rows, -1)


def floats(rng, kind, rows, columns):
    out = []
    for begin in range(0, rows, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, rows - begin)
        x = rng.standard_normal((count, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
        out.append((x.view(np.uint32) >> 16).astype("<u2").view(np.uint8) if kind == Q.BF16
                   else x.astype("<f2" if kind == Q.F16 else "<f4"))
    return np.concatenate(out)


def add_weight(writer, rng, name, rows, columns, kind):
    data = quantised(rng, kind, rows, columns) if kind in BLOCKS else floats(rng, kind, rows, columns)
    writer.add_tensor(name, data, raw_dtype=kind)


def add_vocabulary(writer, count):
    """Byte-level BPE: a letter a byte, one merge, and tokens that no text makes up to the wanted number."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = (chr(256 + i) for i in range(256))
    tokens = [chr(b) if b in plain else next(other) for b in range(256)] + ["th", "<|endoftext|>"]
    unused = count - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + [f"<|unused{i}|>" for i in range(unused)])
    writer.add_token_types([NORMAL] * 257 + [CONTROL] + [UNUSED] * unused)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_vocab_size(count)


def write(path, kind, width, ffn, layers, vocabulary):
    rng = np.random.default_rng(1)
    heads, kv = width // HEAD_DIM, max(1, width // HEAD_DIM // GROUP) * HEAD_DIM
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(f"random {kind.name} {width} {ffn} {layers}")
    w.add_block_count(layers)
    w.add_context_length(CONTEXT)
    w.add_embedding_length(width)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(kv // HEAD_DIM)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(HEAD_DIM)
    add_vocabulary(w, vocabulary)
    add_weight(w, rng, "token_embd.weight", vocabulary, width, kind)
    w.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            w.add_tensor(f"{block}{norm}.weight", np.ones(width, np.float32))
        for name, rows, columns in (("attn_q", width, width), ("attn_k", kv, width), ("attn_v", kv, width),
                                    ("attn_output", width, width), ("ffn_gate", ffn, width), ("ffn_up", ffn, width),
                                    ("ffn_down", width, ffn)):
            add_weight(w, rng, f"{block}{name}.weight", rows, columns, kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write; must not lie in the repository")
    parser.add_argument("--type", default="q4_k", choices=[k.name.lower() for k in KINDS])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32768)
    a = parser.parse_args()
    kind = Q[a.type.upper()]
    unit = BLOCKS[kind][0] if kind in BLOCKS else 32
    if a.width % max(unit, HEAD_DIM * GROUP) or a.ffn % unit:
        sys.exit(f"make_model.py: {a.type} needs a width that is a multiple of {max(unit, HEAD_DIM * GROUP)} and an FFN "
                 f"that is one of {unit}: {a.width} and {a.ffn} are not")
    root = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    if os.path.realpath(a.out).startswith(root + os.sep):
        sys.exit(f"make_model.py: {a.out} lies in the repository: choose a place outside")
    part = a.out + ".part"
    write(part, kind, a.width, a.ffn, a.layers, a.vocabulary)
    os.replace(part, a.out)


if __name__ == "__main__":
    main()
