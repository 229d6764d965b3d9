"""Lossy levels of the codec through the real programs: who may use them, and who may use what went through them."""
import json
import os
import shutil

import pytest

from harness import MODEL, Cloud, Edge
from test_invariance import client_of, messages

UNCHECKED = ["--codec", "l2", "--codec-unchecked", "--hidden", "f32"]


def ask(client, fidelity):
    r = client.chat.completions.create(model="default", messages=messages(), temperature=0, max_tokens=8, seed=1,
                                       extra_body={"fidelity": fidelity})
    return r.choices[0].message.content, r.usage.prompt_tokens_details.cached_tokens


def test_l2_is_used_by_those_who_accept_it(tmp_path):
    c = Cloud(tmp_path)
    token, other = c.new_token(principal="alice"), c.new_token(principal="bob")
    c.start()
    e = Edge(tmp_path, c, token, 8, extra=UNCHECKED).start()
    try:
        device, direct, bob = client_of(e), client_of(c, token, c.ca), client_of(c, other, c.ca)
        text, cached = ask(device, "any")
        assert text and cached == 0
        assert ask(direct, "any")[1] >= 64, "the control: its blocks are there"
        assert ask(bob, "any")[1] == 0, "what a device computed is its principal's own"
        truth = ask(bob, "exact")[0]  # computed by the cloud alone
        assert ask(direct, "exact")[0] == truth
    finally:
        assert e.stop() == 0
        assert c.stop() == 0


@pytest.mark.parametrize("fidelity", ["visible-lossless", "exact"])
def test_l2_is_nobodys_default(tmp_path, fidelity):
    """Blocks at L2 are no hit for requests that want better."""
    c = Cloud(tmp_path)
    token = c.new_token()
    c.start()
    e = Edge(tmp_path, c, token, 8, extra=UNCHECKED).start()
    try:
        ask(client_of(e), "any")
        assert ask(client_of(c, token, c.ca), fidelity)[1] == 0
    finally:
        assert e.stop() == 0
        assert c.stop() == 0


def test_a_record_decides(tmp_path, cloud):
    """Without a record, and with one that shows loss, l2 is refused in one line; with one that shows none it is taken."""
    model = tmp_path / "model.gguf"
    os.symlink(MODEL, model)
    record = tmp_path / "model.gguf.codec.json"
    token = cloud.new_token(principal="record")

    def start(level):
        e = Edge(tmp_path / f"e{len(os.listdir(tmp_path))}", cloud, token, 8, model=str(model), extra=["--codec", level])
        return e.start(wait=False)

    def refusal(level):
        e = start(level)
        assert e.process.wait(600) != 0
        return e.log()

    assert "no quality record" in refusal("l2") and "--codec-unchecked" in refusal("l2")
    shipped = os.path.join(os.path.dirname(__file__), "../../deploy/SmolLM2-135M-Instruct.Q4_1.gguf.codec.json")
    shutil.copy(shipped, record)
    figures = json.loads(record.read_text())
    levels = {level["level"]: level for level in figures["levels"]}
    assert "above the limit" in refusal("l2")
    assert levels["l2-k5"]["top1"] < 0.985
    assert "changes too often" in refusal("l2-k5")
    for name in ("kl_mean", "kl_p99", "top1", "ppl_change", "ppl_change_low", "ppl_change_high"):
        levels["l2-k5"][name] = levels["l1"][name]  # a model that loses nothing by it
    record.write_text(json.dumps(figures))
    e = start("l2-k5")
    e.wait_ready()
    assert e.stop() == 0
    e = start("auto")  # takes it, the smallest that passes
    e.wait_ready()
    reply = client_of(e).chat.completions.create(model="default", messages=[{"role": "user", "content": "Tell me about bees. " * 30}], max_tokens=2,
                                                 extra_body={"fidelity": "any", "timings": True})
    assert reply.timings["plan"]["codec"] == "l2-k5"
    assert e.stop() == 0
    record.write_text(record.read_text().replace(json.loads(record.read_text())["fingerprint"], 64 * "0"))
    assert "another model" in refusal("l2-k5")
    assert "another model" in refusal("auto") and "--codec l1 --codec-unchecked" in refusal("auto")
