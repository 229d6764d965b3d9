"""A float32 reference forward pass of a GGUF model, to measure Tandem's engine against.

It is written to be read next to the papers and to be obviously right, not to be fast: weights are
dequantised in full by the `gguf` package's own code, every product is a plain numpy product, and a
whole sequence is computed at once with no KV cache. It shares no code with Tandem.

Architectures: llama (tied or untied head, MHA or GQA, RoPE scaling "linear" and the per-frequency
factors of rope_freqs.weight that Llama 3 files carry), qwen2 (bias on q, k, v), qwen3 (RMS norm of
each q and k head). Anything else is refused.

Two conventions of RoPE meet here. Both turn pairs of values by position * freq[i]:
  NORM  pairs (2i, 2i+1)        llama files; their q and k rows were permuted for it by the converter
  NEOX  pairs (i, i + rot/2)    qwen2 and qwen3 files
"""

import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

NEOX = {"llama": False, "qwen2": True, "qwen3": True}


def metadata(path):
    """All key-value pairs of a GGUF file, arrays as Python lists."""
    return {f.name: f.contents() for f in GGUFReader(path).fields.values() if not f.name.startswith("GGUF.")}


class Model:
    """Weights and hyper-parameters of one file. dtype float64 tells rounding from mistakes."""

    def __init__(self, path, dtype=np.float32):
        reader = GGUFReader(path)
        self.dtype = dtype
        self.w = {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]).astype(dtype)
                  for t in reader.tensors}
        self.kv = {f.name: f.contents() for f in reader.fields.values()
                   if not f.name.startswith(("tokenizer.", "GGUF."))}
        self.arch = self.kv["general.architecture"]
        if self.arch not in NEOX:
            raise ValueError(f"{path}: no reference for architecture {self.arch!r}")
        self.layers = self.hp("block_count")
        self.width = self.hp("embedding_length")
        self.heads = self.hp("attention.head_count")
        self.kv_heads = self.hp("attention.head_count_kv", self.heads)
        self.head_dim = self.hp("attention.key_length", self.width // self.heads)
        self.rot = self.hp("rope.dimension_count", self.head_dim)
        self.eps = self.hp("attention.layer_norm_rms_epsilon")
        self.freqs = self.rope_frequencies()
        self.head = self.w.get("output.weight", self.w["token_embd.weight"])

    def hp(self, key, default=None):
        value = self.kv.get(f"{self.arch}.{key}", default)
        if value is None:
            raise ValueError(f"missing key {self.arch}.{key}")
        return value

    def rope_frequencies(self):
        """Radians per position for each of the rot / 2 pairs, in float64."""
        freqs = self.hp("rope.freq_base", 10000.0) ** (-np.arange(0, self.rot, 2, dtype=np.float64) / self.rot)
        kind = self.hp("rope.scaling.type", "none")
        if kind == "linear":
            freqs = freqs / self.hp("rope.scaling.factor")
        elif kind != "none":
            raise ValueError(f"no reference for RoPE scaling {kind!r}")
        if "rope_freqs.weight" in self.w:
            freqs = freqs / self.w["rope_freqs.weight"].astype(np.float64)
        return freqs

    def linear(self, x, name):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.dtype(self.eps)) * self.w[name + ".weight"]

    def rope(self, x):
        """x [tokens, heads, head_dim], token t at position t. Dimensions from rot on pass through."""
        angle = np.arange(len(x), dtype=np.float64)[:, None, None] * self.freqs
        cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        half = self.rot // 2
        first, second = ((slice(0, half), slice(half, self.rot)) if NEOX[self.arch]
                         else (slice(0, self.rot, 2), slice(1, self.rot, 2)))
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def attention(self, x, layer):
        n, block = len(x), f"blk.{layer}."
        q = self.linear(x, block + "attn_q").reshape(n, self.heads, self.head_dim)
        k = self.linear(x, block + "attn_k").reshape(n, self.kv_heads, self.head_dim)
        v = self.linear(x, block + "attn_v").reshape(n, self.kv_heads, -1)
        if block + "attn_q_norm.weight" in self.w:
            q, k = self.norm(q, block + "attn_q_norm"), self.norm(k, block + "attn_k_norm")
        q, k = self.rope(q), self.rope(k)
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        score = np.einsum("qhd,khd->hqk", q, k) / self.dtype(np.sqrt(self.head_dim))
        score[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        p = np.exp(score - score.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return self.linear(np.einsum("hqk,khd->qhd", p, v).reshape(n, -1), block + "attn_output")

    def mlp(self, x, layer):
        gate = self.linear(x, f"blk.{layer}.ffn_gate")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, f"blk.{layer}.ffn_up"), f"blk.{layer}.ffn_down")

    def hidden(self, ids, layer_end=None):
        """The residual stream [tokens, width] after layers [0, layer_end)."""
        x = self.w["token_embd.weight"][np.asarray(ids)]
        for layer in range(self.layers if layer_end is None else layer_end):
            x = x + self.attention(self.norm(x, f"blk.{layer}.attn_norm"), layer)
            x = x + self.mlp(self.norm(x, f"blk.{layer}.ffn_norm"), layer)
        return x

    def logits(self, ids, last=None):
        """Logits [tokens, vocabulary], or of the `last` tokens only."""
        x = self.hidden(ids)
        return self.norm(x if last is None else x[-last:], "output_norm") @ self.head.T


def log_softmax(logits):
    """Log-probabilities in float64, so that what is derived from them adds no error of its own."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: reference.py model.gguf id [id ...]   prints the most likely next ids")
    last_row = Model(sys.argv[1]).logits([int(a) for a in sys.argv[2:]], last=1)[0]
    for token in np.argsort(-last_row)[:10]:
        print(token, last_row[token])
