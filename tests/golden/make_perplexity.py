"""Writes perplexity.json: how likely the float32 reference finds over 10,000 tokens: the documents of logits.json, and windows of
512 tokens of the project's own documents as they were when this was run.

usage: make_perplexity.py SmolLM2-135M-Instruct.Q4_1.gguf
needs: numpy gguf llama-cpp-python (as tokenizer)   (some minutes on two cores)
"""

import json
import math
import os
import sys

import llama_cpp

from make_logits import dumps
from reference import Model, log_softmax

HERE = os.path.dirname(os.path.abspath(__file__))
WINDOW = 512
SOURCES = ["README.md", "ARCHITECTURE.md", "protocol/WIRE.md"]
WINDOWS = 4  # of each, evenly spread


def windows(llm, path):
    with open(os.path.join(HERE, "..", "..", path), "rb") as f:
        ids = llm.tokenize(f.read(), add_bos=False, special=False)
    count = min(WINDOWS, len(ids) // WINDOW)
    step = (len(ids) - WINDOW) // max(count - 1, 1)
    return [(f"{path}, from token {i * step}", ids[i * step:i * step + WINDOW]) for i in range(count)]


def main(path):
    model = Model(path)
    llm = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    with open(os.path.join(HERE, "logits.json")) as f:
        documents = [(d["text"], d["ids"]) for d in json.load(f)["documents"]]
    for source in SOURCES:
        documents += windows(llm, source)
    records, total, positions = [], 0.0, 0
    for name, ids in documents:
        ref = log_softmax(model.logits(ids))
        nll = -math.fsum(float(ref[t, following]) for t, following in enumerate(ids[1:]))
        records.append({"name": name, "ids": ids, "nll": round(nll, 4)})
        total, positions = total + nll, positions + len(ids) - 1
        print(f"{name:40} {len(ids):4} tokens  {math.exp(nll / (len(ids) - 1)):.4f}", flush=True)
    summary = {"positions": positions, "perplexity": math.exp(total / positions), "documents": records}
    with open(os.path.join(HERE, "perplexity.json"), "w") as f:
        f.write(dumps(summary))
    print(positions, summary["perplexity"])


if __name__ == "__main__":
    main(sys.argv[1])
