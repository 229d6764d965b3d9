"""Writes tokens_*.bin.zst: what text becomes in tokens, by references that share nothing with Tandem.

usage: make_tokens.py SmolLM2-135M-Instruct.Q4_1.gguf
needs: numpy gguf tokenizers zstandard llama-cpp-python, and in tiny/ llama-spm.gguf and bpe-vocabulary.gguf

Every set is computed twice. Byte-level BPE: llama.cpp, and Hugging Face `tokenizers` set up from the same vocabulary with the
published pre-tokenizer of each family. The sets pre_* are made on tiny/bpe-vocabulary.gguf, once under each `pre`.
SentencePiece: llama.cpp, and the plain merge loop below. A line on which the two differ is printed and left out.
"""

import os
import struct
import sys
import tempfile

import gguf
import llama_cpp
import zstandard
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from lines import SPECIALS, lines
from make_tiny import CONTROL, byte_letters
from reference import metadata

HERE = os.path.dirname(os.path.abspath(__file__))
NUMBER_RULE = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
FAMILY_RULE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")


# ---- the references --------------------------------------------------------------------------------------

class LlamaCpp:
    """With special, text that reads like a special token is one."""

    def __init__(self, path):
        self.llm = llama_cpp.Llama(path, vocab_only=True, verbose=False)

    def encode(self, text, special=False):
        return self.llm.tokenize(text.encode(), add_bos=False, special=special)


def vocabulary_file(path, kv, pre):
    """A GGUF file without tensors that holds the vocabulary of kv under another pre-tokenizer."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(kv["tokenizer.ggml.tokens"])
    w.add_token_types(kv["tokenizer.ggml.token_type"])
    w.add_token_merges(kv["tokenizer.ggml.merges"])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


class HuggingFace:
    def __init__(self, kv, pre, special=False):
        vocabulary = {token: i for i, token in enumerate(kv["tokenizer.ggml.tokens"])}
        merges = [tuple(m.split(" ")) for m in kv["tokenizer.ggml.merges"]]
        self.tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
        if pre == "smollm":
            steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        else:
            rule = Regex(FAMILY_RULE.replace("NUMBER", NUMBER_RULE[pre]))
            steps = [pre_tokenizers.Split(rule, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if special:
            control = [t for t, kind in zip(kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"]) if kind == CONTROL]
            self.tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


class SentencePiece:
    """Join the neighbours whose union scores best, leftmost first, until none is a piece; bytes for what remains."""

    def __init__(self, kv):
        self.ids = {token: i for i, token in enumerate(kv["tokenizer.ggml.tokens"])}
        self.scores = kv["tokenizer.ggml.scores"]

    def encode(self, text):
        parts = list(("▁" + text.replace(" ", "▁")) if text else "")
        while True:
            best = None
            for i in range(len(parts) - 1):
                token = self.ids.get(parts[i] + parts[i + 1])
                if token is not None and (best is None or self.scores[token] > self.scores[best[1]]):
                    best = i, token
            if best is None:
                break
            parts[best[0]:best[0] + 2] = [parts[best[0]] + parts[best[0] + 1]]
        ids = []
        for part in parts:
            ids += [self.ids[part]] if part in self.ids else [self.ids[f"<0x{b:02X}>"] for b in part.encode()]
        return ids


# ---- the sets --------------------------------------------------------------------------------------------

def plain_pieces(kv):
    """The vocabulary's tokens that are whole characters, as text."""
    to_byte = {letter: b for b, letter in enumerate(byte_letters())}
    out = []
    for token in kv["tokenizer.ggml.tokens"]:
        try:
            out.append(bytes(to_byte[c] for c in token).decode())
        except (KeyError, UnicodeDecodeError):
            pass
    return out


def write(name, pairs):
    body = b"".join(struct.pack("<II", len(t.encode()), len(ids)) + t.encode() + struct.pack(f"<{len(ids)}i", *ids)
                    for t, ids in pairs)
    data = zstandard.ZstdCompressor(level=19).compress(struct.pack("<4sII", b"TDTK", 1, len(pairs)) + body)
    with open(os.path.join(HERE, f"tokens_{name}.bin.zst"), "wb") as f:
        f.write(data)
    print(f"{name}: {len(pairs)} lines, {sum(len(i) for _, i in pairs)} tokens, {len(data)} bytes")


def agreed(name, texts, first, second):
    pairs, differing = [], 0
    for text in texts:
        one, two = first(text), second(text)
        if one == two:
            pairs.append((text, one))
        else:
            differing += 1
            print(f"{name}: differ on {ascii(text)}\n  {one}\n  {two}")
    print(f"{name}: {differing} of {len(texts)} lines differ between the references")
    return pairs


def special_lines(texts):
    """Ordinary lines with special tokens between and inside them."""
    marks = [s for s in SPECIALS if s.startswith("<|im_") or s == "<|endoftext|>"]
    return [marks[i % len(marks)] + text + marks[(i * 7 + 1) % len(marks)] for i, text in enumerate(texts)]


def main(path):
    kv = metadata(path)
    pieces = plain_pieces(kv)
    smollm = LlamaCpp(path)
    write("smollm", agreed("smollm", lines(1, 340, pieces), smollm.encode, HuggingFace(kv, "smollm").encode))
    with_specials = special_lines(lines(2, 8, pieces))
    write("smollm_special", agreed("smollm_special", with_specials, lambda t: smollm.encode(t, special=True),
                                   HuggingFace(kv, "smollm", special=True).encode))
    vocabulary = metadata(os.path.join(HERE, "tiny", "bpe-vocabulary.gguf"))
    texts = lines(3, 34, plain_pieces(vocabulary))
    for pre in ("smollm", "llama-bpe", "qwen2"):
        with tempfile.TemporaryDirectory() as folder:
            other = os.path.join(folder, "vocabulary.gguf")
            vocabulary_file(other, vocabulary, pre)
            write("pre_" + pre, agreed(pre, texts, LlamaCpp(other).encode, HuggingFace(vocabulary, pre).encode))
    tiny = os.path.join(HERE, "tiny", "llama-spm.gguf")
    write("spm", agreed("spm", lines(5, 34, pieces), LlamaCpp(tiny).encode, SentencePiece(metadata(tiny)).encode))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
