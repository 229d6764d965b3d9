"""The tandem command: chat, conversations, slices, the store; and an edge that holds a slice only."""
import json
import os
import re
import subprocess

from conftest import client_of
from harness import BIN, MODEL, Edge

ENV = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}  # TANDEM_MODEL would be a setting


def tandem(*arguments, stdin="", code=0):
    r = subprocess.run([BIN / "tandem", *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=120, env=ENV)
    assert r.returncode == code, r.stdout + r.stderr
    return r


def test_chat_saves_and_resumes(edge, tmp_path):
    transcript = tmp_path / "talk.txt"
    r = tandem("chat", "--url", edge.url, "--seed", 1, "--max-tokens", 16, stdin=f"Name a river.\n/id\n/save {transcript}\nAnd another?\n/exit\n")
    conversation = re.search(r"conv-[0-9a-f]+", r.stderr).group(0)
    assert "> Name a river." in transcript.read_text() and conversation in r.stderr
    shown = json.loads(tandem("conv", "show", conversation, "--url", edge.url, "--json").stdout)
    before = shown["tokens"]
    tandem("chat", "--url", edge.url, "--conversation", conversation, "--max-tokens", 8, "Thank you.")
    assert json.loads(tandem("conv", "show", conversation, "--url", edge.url, "--json").stdout)["tokens"] > before
    assert conversation in tandem("conv", "ls", "--url", edge.url).stdout
    tandem("conv", "rm", conversation, "--url", edge.url)
    assert conversation not in tandem("conv", "ls", "--url", edge.url).stdout
    assert len(tandem("conv", "show", conversation, "--url", edge.url, code=1).stderr.strip().splitlines()) == 1


def test_slice_is_enough_for_an_edge(cloud, edge, tmp_path):
    device = tmp_path / "device.gguf"
    tandem("model", "slice", "--layers", "0:8", MODEL, device)
    whole, part = (json.loads(tandem("model", "fingerprint", f, "--json").stdout)["fingerprint"] for f in (MODEL, device))
    assert whole == part
    assert device.stat().st_size < 0.6 * os.stat(MODEL).st_size
    tandem("model", "verify", device)
    ask = dict(model="default", messages=[{"role": "user", "content": "What do bees do in winter? " * 12}], temperature=0, max_tokens=16,
               extra_body={"cache": False, "fidelity": "exact"})
    reference = client_of(cloud, cloud.token, cloud.ca).chat.completions.create(**ask).choices[0].message.content
    e = Edge(tmp_path / "e", cloud, cloud.new_token(principal="sliced"), 8, model=str(device), extra=["--codec", "l0", "--hidden", "f32"]).start()
    try:
        r = client_of(e).chat.completions.create(**{**ask, "extra_body": {**ask["extra_body"], "timings": True}})
        assert r.choices[0].message.content == reference
        assert r.timings["edge_layers"] == 8 and r.timings["edge_prefill_tokens"] > 0
    finally:
        assert e.stop() == 0


def test_store_is_listed_and_verified(tmp_path):
    from harness import Cloud
    c = Cloud(tmp_path)
    token = c.new_token()
    c.start()
    client_of(c, token, c.ca).chat.completions.create(model="default", messages=[{"role": "user", "content": "One two three. " * 60}], max_tokens=4)
    at = ("--store", c.store, "--store-key-file", tmp_path / "store.key", "--json")
    assert len(tandem("store", "ls", *at, code=1).stderr.strip().splitlines()) == 1  # a node holds it
    c.stop()
    listing = json.loads(tandem("store", "ls", *at).stdout)
    assert listing["blocks"] >= 2 and listing["conversations"] == 1 and listing["tenants"][0]["tenant"] == "acme"
    verified = json.loads(tandem("store", "verify", *at).stdout)
    assert verified["bad"] == 0 and verified["records"] > listing["blocks"]


def test_bench(tmp_path):
    r = json.loads(tandem("bench", "engine", "--model", MODEL, "--threads", 2, "--prompt", 64, "--gen", 4, "--repeat", 1, "--json").stdout)
    assert r["prefill_tps"] > 0 and r["decode_tps"] > 0
