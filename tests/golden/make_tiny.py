"""Writes tiny/*.gguf, small complete models with random weights, and beside each NAME.logits, what the
float32 reference computes for a fixed sequence of ids; tiny/tiny.json says how far llama.cpp is from it.

usage: make_tiny.py SmolLM2-135M-Instruct.Q4_1.gguf   (its merges make the SentencePiece vocabulary)
needs: numpy gguf llama-cpp-python

The files are the smallest that still take every path of the engine: two layers, grouped heads, a
vocabulary of all bytes, some merges and some special tokens. Where only the architecture is to be
measured the weights are F16 or BF16, so that an error cannot hide behind the rounding of a quantised
product; the type-* files have one weight type each.
"""

import json
import os
import struct
import sys

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from reference import Model, log_softmax, metadata

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny")
SPM_MERGES = 900
IDS_COUNT = 100  # crosses the border of a 64-token block
POSITIONS = [0, 1, 2, 15, 31, 32, 62, 63, 64, 65, 66, 80, 95, 97, 98, 99]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


# ---- vocabularies ----------------------------------------------------------------------------------------

def byte_letters():
    """The printable letter that byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = (chr(256 + i) for i in range(256))
    return [chr(b) if b in plain else next(other) for b in range(256)]


def add_bpe(writer, pre, template=None):
    """All bytes, a few merges, four special tokens: 272 tokens."""
    merges = ["h e", "t he", "Ġ the", "i n", "in g", "Ġ a", "e r", "o u", "a n", "an d", "Ġ and", "l l"]
    specials = ["<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = byte_letters() + [m.replace(" ", "") for m in merges] + specials
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (256 + len(merges)) + [CONTROL] * len(specials))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin_of_text|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template(template)
    return len(tokens)


def add_spm(writer, smollm2):
    """SentencePiece as Llama 2 has it: a score for each piece, and a token for each byte that no piece covers.
    The pieces: characters of many scripts, then SmolLM2's first merges that are a word or the start of one."""
    pieces = ["▁", *map(chr, range(33, 127)), *"éèüößñçàåøΑαβγдежзиклмнопрстאבגابت你好世界中文的一是不了日本かなカナ한국어，。"]
    for merge in metadata(smollm2)["tokenizer.ggml.merges"][:SPM_MERGES]:
        piece = merge.replace(" ", "").replace("Ġ", "▁")
        word = piece.removeprefix("▁")
        if (word.isascii() and word.isalpha()) or set(piece) == {"▁"}:
            pieces.append(piece)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + list(dict.fromkeys(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [float(-i) for i in range(len(tokens) - 259)])
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    return len(tokens)


# ---- weights ---------------------------------------------------------------------------------------------

def random_k_blocks(rng, kind, rows, columns, gain):
    """Bytes of a K-quant: every bit of scales and quants is random, only the f16 factors are chosen so that the
    values have mean 0 and a deviation of about gain / sqrt(columns). The gguf package reads these types but does not make them."""
    sizes = {Q.Q4_K: 144, Q.Q5_K: 176, Q.Q6_K: 210}
    blocks = rng.integers(0, 256, (rows * columns // 256, sizes[kind]), dtype=np.uint8)
    jitter = rng.uniform(0.7, 1.3, (len(blocks), 1)) * gain / np.sqrt(columns)

    def put(at, value):
        blocks[:, at:at + 2] = np.broadcast_to(value, (len(blocks), 1)).astype("<f2").view(np.uint8).reshape(-1, 2)

    if kind == Q.Q6_K:  # d * scale * (quant - 32), scale -128..127, quant 0..63
        put(208, jitter / 1370)
    else:  # d * scale * quant - dmin * min, scale and min 0..63, quant 0..15 or 0..31
        top = 15 if kind == Q.Q4_K else 31
        put(0, jitter / (26 * top))
        put(2, jitter / (26 * top) * top / 2)
    return blocks.reshape(rows, -1)


def add_weight(writer, rng, name, rows, columns, kind, gain=1.0):
    if kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
        data = random_k_blocks(rng, kind, rows, columns, gain)
    else:
        data = quantize((rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def add_vector(writer, rng, name, size, mean, deviation):
    writer.add_tensor(name, (mean + deviation * rng.standard_normal(size)).astype(np.float32))


class Shape:
    """What a tiny model looks like; kind(name) gives the weight type of a tensor."""

    def __init__(self, arch="llama", width=64, heads=2, kv_heads=1, head_dim=32, ffn=64, layers=2, tied=True,
                 kinds=Q.F16, vocabulary=None, linear=None, llama3=False, base=10000.0):
        self.__dict__.update(locals())
        self.kind = kinds if callable(kinds) else lambda name: kinds
        self.vocabulary = vocabulary or (lambda writer: add_bpe(writer, "smollm"))


def write(path, seed, s):
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, s.arch)
    w.add_name(f"tiny random {os.path.basename(path)[:-5]}")
    w.add_block_count(s.layers)
    w.add_context_length(512)
    w.add_embedding_length(s.width)
    w.add_feed_forward_length(s.ffn)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(s.base)
    w.add_rope_dimension_count(s.head_dim)
    if s.heads * s.head_dim != s.width:
        w.add_key_length(s.head_dim)
        w.add_value_length(s.head_dim)
    if s.linear:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(s.linear)
    vocab = s.vocabulary(w)
    w.add_vocab_size(vocab)

    def weight(name, rows, columns, gain=1.0):
        add_weight(w, rng, name, rows, columns, s.kind(name), gain)

    weight("token_embd.weight", vocab, s.width, gain=4.0)
    if not s.tied:
        weight("output.weight", vocab, s.width, gain=3.0)
    add_vector(w, rng, "output_norm.weight", s.width, 1.0, 0.2)
    if s.llama3:  # high frequencies stay, low ones are divided by 8, a ramp lies between
        factors = np.clip(np.linspace(-4, 12, s.head_dim // 2), 1, 8)
        w.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for layer in range(s.layers):
        block = f"blk.{layer}."
        add_vector(w, rng, block + "attn_norm.weight", s.width, 1.0, 0.2)
        add_vector(w, rng, block + "ffn_norm.weight", s.width, 1.0, 0.2)
        for name, heads, gain in (("attn_q", s.heads, 1.6), ("attn_k", s.kv_heads, 1.6), ("attn_v", s.kv_heads, 1.0)):
            weight(block + name + ".weight", heads * s.head_dim, s.width, gain)
            if s.arch == "qwen2":
                add_vector(w, rng, block + name + ".bias", heads * s.head_dim, 0.0, 0.5)
            if s.arch == "qwen3" and name != "attn_v":
                add_vector(w, rng, block + name + "_norm.weight", s.head_dim, 1.5, 0.3)
        weight(block + "attn_output.weight", s.width, s.heads * s.head_dim)
        weight(block + "ffn_gate.weight", s.ffn, s.width, 1.5)
        weight(block + "ffn_up.weight", s.ffn, s.width, 1.5)
        weight(block + "ffn_down.weight", s.width, s.ffn)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def k_kinds(name):
    """All three K-quants wherever a row has 256 values; the two narrow matrices in types with blocks of 32."""
    second = name.startswith("blk.1.")
    return {"token_embd.weight": Q.Q4_K, "attn_q.weight": Q.Q5_K if second else Q.Q4_K,
            "attn_k.weight": Q.Q6_K if second else Q.Q5_K, "attn_v.weight": Q.Q4_K if second else Q.Q6_K,
            "ffn_gate.weight": Q.Q6_K if second else Q.Q4_K, "ffn_up.weight": Q.Q4_K if second else Q.Q5_K,
            "attn_output.weight": Q.Q4_0, "ffn_down.weight": Q.Q8_0}[name.removeprefix("blk.0.").removeprefix("blk.1.")]


def models(smollm2):
    small_embedding = {"token_embd.weight": Q.Q4_0}
    yield "llama-gqa-untied", Shape(tied=False, kinds=lambda n: small_embedding.get(n, Q.F16))
    yield "llama-mha-tied", Shape(kv_heads=2, ffn=32, kinds=Q.BF16)
    yield "llama-rope-linear", Shape(linear=4.0)
    yield "llama-rope-freqs", Shape(llama3=True, base=500000.0, vocabulary=lambda w: add_bpe(w, "llama-bpe"))
    yield "llama-spm", Shape(width=32, heads=1, kinds=Q.F16, layers=1, vocabulary=lambda w: add_spm(w, smollm2))
    yield "qwen2", Shape(arch="qwen2", base=1000000.0, vocabulary=lambda w: add_bpe(w, "qwen2", CHATML))
    yield "qwen3", Shape(arch="qwen3", heads=3, ffn=32, base=1000000.0, vocabulary=lambda w: add_bpe(w, "qwen2"))
    yield "type-f32", Shape(kinds=Q.F32, layers=1, ffn=32)
    for kind in (Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1):
        yield "type-" + kind.name.lower(), Shape(kinds=kind, ffn=96)
    yield "type-k", Shape(width=256, ffn=32, heads=2, head_dim=32, kinds=k_kinds)


# ---- expected values -------------------------------------------------------------------------------------

def expect(path, ids):
    """Writes NAME.logits beside the model and returns the reference's logits at all positions."""
    logits = Model(path).logits(ids)
    exact = Model(path, np.float64).logits(ids)
    with open(path[:-5] + ".logits", "wb") as f:
        f.write(struct.pack("<4sIIII", b"TDTL", 1, len(ids), len(POSITIONS), logits.shape[1]))
        f.write(np.array(ids, "<i4").tobytes() + np.array(POSITIONS, "<u4").tobytes())
        f.write(logits[POSITIONS].astype("<f4").tobytes())
    return logits, float(np.abs(logits - exact).max())


def compare(path, ids, logits):
    """llama.cpp against the reference, over all positions."""
    llm = llama_cpp.Llama(path, n_ctx=128, n_batch=128, logits_all=True, n_threads=2, verbose=False)
    llm.eval(ids)
    theirs = np.array(llm.scores[:len(ids)], np.float32)
    ref, other = log_softmax(logits), log_softmax(theirs)
    return {"max_error": float(np.abs(logits - theirs).max()), "mean_kl": float((np.exp(ref) * (ref - other)).sum(-1).mean())}


def main(smollm2):
    os.makedirs(HERE, exist_ok=True)
    summary = {"llama_cpp": "llama-cpp-python " + llama_cpp.__version__, "models": {}}
    for seed, (name, shape) in enumerate(models(smollm2), 1):
        path = os.path.join(HERE, name + ".gguf")
        write(path, seed, shape)
        vocab = len(metadata(path)["tokenizer.ggml.tokens"])
        ids = np.random.default_rng(1000 + seed).integers(0, vocab, IDS_COUNT).tolist()
        logits, rounding = expect(path, ids)
        entry = {"bytes": os.path.getsize(path), "logit_deviation": float(logits.std()), "reference_rounding": rounding}
        try:
            entry["llama_cpp"] = compare(path, ids, logits)
        except (ValueError, RuntimeError, AssertionError) as e:
            entry["llama_cpp"] = f"refused: {e}"
        summary["models"][name] = entry
        print(name, entry, flush=True)
    with open(os.path.join(HERE, "tiny.json"), "w") as f:
        f.write(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
