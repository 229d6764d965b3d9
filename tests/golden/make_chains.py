"""Writes ids.json: chains of block ids and the keys behind them, with Python's hashlib and hmac alone.

usage: make_chains.py
Every input is in the file, so a test needs no rule to repeat. The definition is in shared/KV_FORMAT.md.
"""

import hashlib
import hmac
import json
import os
import random
import struct

from gguf import GGUFReader

HERE = os.path.dirname(os.path.abspath(__file__))
ZEROS = bytes(32)
BLOCK = 64


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def layout_hash(layout):
    message = (b"tandem-kv-layout" + u32(BLOCK, 1, layout["rope_kind"], layout["rope_dim"])
               + struct.pack("<ff", layout["rope_base"], layout["rope_scale"])
               + bytes.fromhex(layout["rope_factors"]) + bytes.fromhex(layout["adapter"]) + u32(1))
    return hashlib.sha256(message).digest()


def principal_key(tenant_chain_key, principal):
    """HKDF-SHA-256 (RFC 5869): extract without salt, expand to one hash."""
    extracted = hmac.digest(ZEROS, tenant_chain_key, "sha256")
    return hmac.digest(extracted, b"tandem-own" + principal.encode() + b"\x01", "sha256")


def chain(key, fingerprint, layout, ids, parent=ZEROS):
    """Ids of all whole blocks of a sequence; what is left over has none."""
    out = []
    for at in range(0, len(ids) - BLOCK + 1, BLOCK):
        parent = hmac.digest(key, parent + fingerprint + layout + u32(*ids[at:at + BLOCK]), "sha256")
        out.append(parent)
    return out


def factors_digest():
    """SHA-256 of the f32 bytes of a real rope_freqs.weight."""
    reader = GGUFReader(os.path.join(HERE, "tiny", "llama-rope-freqs.gguf"))
    tensor = next(t for t in reader.tensors if t.name == "rope_freqs.weight")
    return hashlib.sha256(tensor.data.astype("<f4").tobytes()).hexdigest()


def layouts():
    plain = {"rope_kind": 0, "rope_scale": 1.0, "rope_factors": ZEROS.hex(), "adapter": ZEROS.hex()}
    out = {
        "smollm2": plain | {"rope_dim": 64, "rope_base": 100000.0},
        "llama3": plain | {"rope_dim": 32, "rope_base": 500000.0, "rope_factors": factors_digest()},
        "qwen-linear": plain | {"rope_kind": 1, "rope_dim": 128, "rope_base": 1000000.0, "rope_scale": 4.0,
                                "adapter": hashlib.sha256(b"adapter").hexdigest()},
    }
    for layout in out.values():
        layout["hash"] = layout_hash(layout).hex()
    return out


def sequences():
    with open(os.path.join(HERE, "logits.json"), encoding="utf-8") as f:
        text = json.load(f)["documents"][0]["ids"]
    return {"text": text[:4 * BLOCK + 17], "text from block 2": text[2 * BLOCK:4 * BLOCK + 17], "zeros": [0] * (2 * BLOCK),
            "one block": list(range(49152 - BLOCK, 49152)), "large ids": [2**31 - 1 - i for i in range(BLOCK)],
            "too short": text[:BLOCK - 1]}


# sequence, key, layout, and where the chain goes on from: another chain's last block by its index here and the number of blocks kept
PLAN = [
    ("text", "tenant", "smollm2", None), ("text", "tenant", "llama3", None), ("text", "tenant", "qwen-linear", None),
    ("text", "principal:alice", "smollm2", None), ("text", "principal:bob", "smollm2", None),
    ("zeros", "tenant", "smollm2", None), ("one block", "principal:", "smollm2", None), ("large ids", "principal:zoë", "llama3", None),
    ("too short", "tenant", "smollm2", None), ("text from block 2", "principal:bob", "smollm2", (0, 2)),
]


def dumps(value):
    """JSON with one line for each entry of the outer objects."""
    lines = []
    for key, entry in value.items():
        if isinstance(entry, dict):
            body = ",\n".join(f"  {json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in entry.items())
            lines.append(f' "{key}": {{\n{body}\n }}')
        elif isinstance(entry, list):
            body = ",\n".join("  " + json.dumps(v, ensure_ascii=False) for v in entry)
            lines.append(f' "{key}": [\n{body}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(entry)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    r = random.Random(64)
    tenant, fingerprint = r.randbytes(32), r.randbytes(32)
    keys = {"tenant": tenant} | {"principal:" + n: principal_key(tenant, n) for n in ("alice", "bob", "zoë", "", "p" * 64)}
    shapes, texts, chains = layouts(), sequences(), []
    for sequence, key, layout, follows in PLAN:
        parent = bytes.fromhex(chains[follows[0]]["blocks"][follows[1] - 1]) if follows else ZEROS
        blocks = chain(keys[key], fingerprint, bytes.fromhex(shapes[layout]["hash"]), texts[sequence], parent)
        chains.append({"sequence": sequence, "key": key, "layout": layout, "parent": parent.hex(), "blocks": [b.hex() for b in blocks]})
    result = {"fingerprint": fingerprint.hex(), "keys": {n: k.hex() for n, k in keys.items()}, "layouts": shapes,
              "sequences": texts, "chains": chains}
    with open(os.path.join(HERE, "ids.json"), "w", encoding="utf-8") as f:
        f.write(dumps(result))


if __name__ == "__main__":
    main()
