"""Writes logits.json and logits.bin.zst: what the float32 reference predicts over text/, and how
far llama.cpp is from it by the metric that FORMAT.md defines.

usage: make_logits.py SmolLM2-135M-Instruct.Q4_1.gguf
needs: numpy gguf zstandard llama-cpp-python   (about 10 minutes on two cores)
"""

import glob
import hashlib
import json
import math
import os
import struct
import sys

import llama_cpp
import numpy as np
import zstandard

from reference import Model, log_softmax

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = 192           # tokens kept of each position
STEP = 1 / 1024     # of a stored log-probability, in nats
FLOOR = -16.0       # less likely tokens go into the rest
GREEDY_TOKENS = 48
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ASK = SYSTEM + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    ASK.format("What is the capital of France?"),
    ASK.format("Name three animals that live in the sea."),
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
]


def kept(row):
    """The most likely tokens of one position: ids, their log-probabilities in steps, mass of the rest."""
    ids = np.argsort(-row, kind="stable")[:TOP]
    ids = ids[row[ids] > FLOOR]
    rest = max(0.0, 1.0 - math.fsum(np.exp(row[ids])))
    return ids, np.round(-row[ids] / STEP).astype(np.uint16), rest


def divergence(ids, steps, rest, other):
    """The metric of FORMAT.md: KL of one position against the full log-probabilities `other`."""
    p = np.exp(-steps.astype(np.float64) * STEP)
    q = np.exp(other[ids])
    kl = float(np.sum(p * (np.log(p) - other[ids])))
    if rest > 0:
        kl += rest * (math.log(rest) - math.log(max(1.0 - q.sum(), 1e-30)))
    return kl + 1.0 - p.sum() - rest


def run_llama(llm, ids):
    llm.reset()
    llm.eval(ids)
    return np.array(llm.scores[:len(ids)], np.float32)


class Columns:
    """The arrays of logits.bin, filled position by position."""

    def __init__(self):
        self.nll, self.rest, self.count, self.ids, self.steps = [], [], [], [], []

    def add(self, nll, ids, steps, rest):
        self.nll.append(nll)
        self.rest.append(rest)
        self.count.append(len(ids))
        self.ids.append(ids)
        self.steps.append(np.diff(steps.astype(np.int64), prepend=0))

    def pack(self):
        ids, steps = np.concatenate(self.ids), np.concatenate(self.steps)
        head = struct.pack("<4sIII", b"TDLG", 1, len(self.nll), len(ids))
        return b"".join([head, np.array(self.nll, "<f4").tobytes(), np.array(self.rest, "<f4").tobytes(),
                         np.array(self.count, "<u2").tobytes(), ids.astype("<u2").tobytes(),
                         steps.astype("<u2").tobytes()])


def documents(model, llm, columns):
    """One record for logits.json of each text; what belongs in logits.bin goes to columns."""
    records = []
    for path in sorted(glob.glob(os.path.join(HERE, "text", "*.txt"))):
        with open(path, "rb") as f:
            ids = llm.tokenize(f.read(), add_bos=False, special=True)
        assert len(ids) <= 512, path
        ref, other = log_softmax(model.logits(ids)), log_softmax(run_llama(llm, ids))
        stats = np.zeros(5)
        for t, following in enumerate(ids[1:]):
            top, steps, rest = kept(ref[t])
            columns.add(-ref[t, following], top, steps, rest)
            exact = float(np.sum(np.exp(ref[t]) * (ref[t] - other[t])))
            stats += (-ref[t, following], -other[t, following], divergence(top, steps, rest, other[t]), exact,
                      np.argmax(ref[t]) == np.argmax(other[t]))
        records.append({"text": os.path.basename(path), "ids": ids, "sums": stats.tolist()})
        print(f"{records[-1]['text']:24} {len(ids):4} tokens  KL {stats[2] / (len(ids) - 1):.6f}", flush=True)
    return records


def greedy(model, llm, prompt):
    """The reference's most likely continuation, with how much more likely each token was than the next best."""
    ids = llm.tokenize(prompt.encode(), add_bos=False, special=True)
    tokens, margins = [], []
    while len(tokens) < GREEDY_TOKENS:
        row = model.logits(ids + tokens, last=1)[0]
        first, second = np.argsort(-row, kind="stable")[:2]
        tokens.append(int(first))
        margins.append(round(float(row[first] - row[second]), 4))
    theirs = np.argmax(run_llama(llm, ids + tokens)[len(ids) - 1:-1], axis=1)
    return {"prompt": prompt, "ids": ids, "tokens": tokens, "margins": margins,
            "text": llm.detokenize(tokens, special=True).decode(errors="replace"),
            "llama_cpp_same": int(np.sum(theirs == np.array(tokens)))}


def main(path):
    model = Model(path)
    llm = llama_cpp.Llama(path, n_ctx=512, n_batch=512, logits_all=True, n_threads=2, verbose=False)
    columns = Columns()
    records = documents(model, llm, columns)
    count = sum(len(r["ids"]) - 1 for r in records)
    total = np.sum([r.pop("sums") for r in records], axis=0) / count
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    summary = {
        "model": os.path.basename(path), "model_sha256": digest, "positions": count,
        "reference": {"perplexity": math.exp(total[0])},
        "llama_cpp": {"version": "llama-cpp-python " + llama_cpp.__version__,
                      "settings": "n_ctx 512, n_batch 512, KV f16; " + llama_cpp.llama_print_system_info().decode().strip(" |"),
                      "perplexity": math.exp(total[1]), "mean_kl": total[2], "mean_kl_full_vocabulary": total[3],
                      "same_top_token": total[4]},
        "step": STEP, "documents": records, "greedy": [greedy(model, llm, p) for p in PROMPTS],
    }
    with open(os.path.join(HERE, "logits.json"), "w") as f:
        f.write(dumps(summary))
    with open(os.path.join(HERE, "logits.bin.zst"), "wb") as f:
        f.write(zstandard.ZstdCompressor(level=19).compress(columns.pack()))
    print({k: v for k, v in summary.items() if k in ("positions", "reference", "llama_cpp")})


def dumps(value):
    """JSON with one line for each list of numbers, so that a diff of it can be read."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    lines, flat = [], None
    for line in text.split("\n"):
        item = line.strip().rstrip(",")
        if flat is not None and item.lstrip("-").replace(".", "").isdigit():
            flat.append(line.strip())
        elif flat is not None and item == "]":
            lines[-1] += " ".join(flat) + line.strip()
            flat = None
        else:
            lines.append(line)
            flat = [] if line.endswith(("ids\": [", "tokens\": [", "margins\": [")) else None
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
