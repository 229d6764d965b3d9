"""prefer=private: the cloud never has the prompt's text or token ids, neither on the wire nor in its files or memory, and says the same all the same. Every
scan has a control that finds in a normal request what must be missing from a private one. What the cloud does see, the README says."""
import os
import shutil
import struct
import threading
import time

import openai
import pytest

from conftest import client_of
from harness import Cloud, Edge, Relay, Stack
from test_privacy import files_of, found, image_at_once, plain

TEXT = "Chartreuse pelicans auction fourteen brass metronomes under the whispering aqueduct. "
PROMPT = TEXT * 3 + " ".join(f"On day {i} the fox went {i * 7 % 40} steps to the well." for i in range(24))
EXACT = {"ignore_eos": True, "fidelity": "exact", "timings": True}
FORMS = ["--codec", "l0", "--hidden", "f32"]


class World(Stack):
    """One cloud without TLS behind a recording relay, one edge."""

    def __init__(self, path, extra=(), layers=8):
        self.path = path
        self.cloud = Cloud(path / "c", extra=["--kv-memory", "256M"])
        self.token = self.cloud.new_token()
        self.cloud.command = lambda base=self.cloud.command: list(plain(base()))
        self.cloud.start()
        self.relay = Relay(self.cloud.port, record=True)
        self.edge = self.new_edge("e", self.token, extra, layers)

    def new_edge(self, name, token, extra=(), layers=8):
        return Edge(self.path / name, self.cloud, token, layers, extra=["--plain", *FORMS, *extra], cloud_port=self.relay.port).start()

def ask(edge, prompt=PROMPT, prefer="private", conversation=None, tokens=48, **extra):
    body = {**EXACT, **extra, **({"prefer": prefer} if prefer else {}), **({"conversation": conversation} if conversation else {})}
    r = client_of(edge).chat.completions.with_raw_response.create(model="default", messages=[{"role": "user", "content": prompt}], temperature=0.8, seed=21,
                                                                  max_tokens=tokens, extra_body=body)
    return r.headers["x-conversation-id"], r.parse()


def text_of(reply):
    return reply.choices[0].message.content


def needles_of(edge, text):
    """The text, and its ids as anything might pack them."""
    ids = client_of(edge)._client.post(edge.url + "/tokenize", json={"content": text}).json()["tokens"][4:16]
    assert len(ids) == 12
    return [text[20:60].encode(), struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(ids)}H", *ids), str(ids)[1:-1].encode(), str(ids)[1:-1].replace(" ", "").encode()]


def while_it_runs(world, prefer, look):
    """What `look` finds while the reply is being made, and the reply."""
    stream = client_of(world.edge).chat.completions.create(model="default", messages=[{"role": "user", "content": PROMPT}], temperature=0.8, seed=21, max_tokens=120,
                                                           stream=True, extra_body={**EXACT, "prefer": prefer, "cache": False})
    next(stream), next(stream)
    seen = look()
    return seen, "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_nothing_of_the_prompt_is_in_the_cloud(world):
    needles = needles_of(world.edge, PROMPT)
    image = lambda: found(needles, image_at_once(world.cloud.process))
    seen, private = while_it_runs(world, "private", image)
    assert seen == [], "the node's memory holds the prompt while it answers"
    conversation, first = ask(world.edge)
    ask(world.edge, "And what then?", conversation=conversation)
    assert b"tandem-edge/" in world.relay.sent(), "frames are unmasked"
    assert found(needles, world.relay.sent() + bytes(world.relay.recorded)) == []
    assert image() == []
    assert world.cloud.stop() == 0  # everything is on the disk, index included
    files = files_of(world.path / "c")
    assert any(p.name.startswith("seg-") and p.stat().st_size > 100_000 for p in files)
    for path in files:
        assert found(needles, path.read_bytes()) == [], path
    # The controls: the same request, not private.
    world.cloud.start()
    seen, normal = while_it_runs(world, "latency", image)
    assert needles[1] in seen
    assert needles[1] in world.relay.sent()
    assert normal[:40] == private[:40]


def test_the_reply_is_the_normal_one_and_blocks_are_found_again(world):
    conversation, private = ask(world.edge)
    assert private.usage.prompt_tokens_details.cached_tokens == 0
    timings = private.model_extra["timings"]
    assert timings.get("recomputed_tokens", 0) == 0 and ("recomputed_tokens" in timings) != ("confirmed_tokens" in timings)  # not told where the device was ahead to the end
    whole = (private.usage.prompt_tokens - 1) // 64 * 64
    other, normal = ask(world.edge, prefer=None)
    assert normal.usage.prompt_tokens_details.cached_tokens == 0, "private blocks are nobody else's, not even the same device's without private"
    assert text_of(normal) == text_of(private)
    _, second = ask(world.edge, "And then?", conversation=conversation)
    assert second.usage.prompt_tokens_details.cached_tokens >= whole
    _, want = ask(world.edge, "And then?", prefer=None, conversation=other)
    assert text_of(second) == text_of(want)
    for attempt in range(5):  # a block that a busy machine reads late is asked of the device
        whole = (second.usage.prompt_tokens - 1) // 64 * 64
        assert world.cloud.stop() == 0
        world.cloud.start()
        _, second = ask(world.edge, f"And then? {attempt}", conversation=conversation)
        if second.usage.prompt_tokens_details.cached_tokens >= whole:
            break
    assert second.usage.prompt_tokens_details.cached_tokens >= whole
    listed = client_of(world.edge)._client.get(world.edge.url + "/v1/conversations").json()["data"]
    assert {c["id"] for c in listed} == {conversation, other}, "the device keeps the history"
    cloud = client_of(world.cloud, world.token)
    kept = cloud._client.get(f"http://localhost:{world.cloud.port}/v1/conversations", headers={"Authorization": f"Bearer {world.token}"}).json()["data"]
    assert {c["id"] for c in kept} == {other}, "the cloud has heard of the normal one only"


def test_nobody_of_the_same_tenant_finds_them(world):
    ask(world.edge)
    shutil.copytree(world.edge.dir / "data", world.path / "bob/data")  # even with the device's own keys
    bob = world.new_edge("bob", world.cloud.new_token(principal="bob"))
    try:
        _, his = ask(bob)
        assert his.usage.prompt_tokens_details.cached_tokens == 0
    finally:
        bob.kill()


def disturbed(world, disturb, size=None, delay=None, tokens=80):
    """The reply, or the one line that it failed with, while `disturb` happens after so many bytes or seconds."""
    timer = threading.Timer(delay or 0, disturb)
    if size:
        world.relay.at_bytes(size, disturb)
    else:
        timer.start()
    try:
        return text_of(ask(world.edge, tokens=tokens, cache=False)[1])
    except openai.APIStatusError as e:
        line = e.response.json()["error"]["message"]
        assert line and "\n" not in line
        return None
    finally:
        if size:
            world.relay.fired()
        else:
            timer.join()


def test_killed_or_cut_in_mid_prompt_and_mid_reply(world):
    want = text_of(ask(world.edge, tokens=80, cache=False)[1])

    def kill():
        world.cloud.kill()
        world.cloud.start()

    def cut():
        world.relay.cut()
        time.sleep(0.3)
        world.relay.restore()

    got = []
    for disturb in (kill, cut):
        for size in (1, 300_000, 1_500_000):
            got.append(disturbed(world, disturb, size=size))
        for delay in (0.6, 1.0, 1.6):
            got.append(disturbed(world, disturb, delay=delay))
        time.sleep(1)
    assert all(text in (want, None) for text in got)
    assert sum(text == want for text in got) >= len(got) - 1, "and hardly ever the line"


def test_edge_killed_and_asked_again_under_its_key(world):
    body = dict(model="default", messages=[{"role": "user", "content": PROMPT}], temperature=0.8, seed=21, max_tokens=80)
    whole = text_of(client_of(world.edge).chat.completions.create(**body, extra_body={**EXACT, "prefer": "private"}))
    for attempt, delay in enumerate((0.3, 1.0)):
        headers = {"Idempotency-Key": f"turn-{attempt}"}
        killer = threading.Timer(delay, world.edge.kill)
        killer.start()
        try:
            client_of(world.edge).chat.completions.create(**body, extra_body={**EXACT, "prefer": "private"}, extra_headers=headers)
        except openai.APIError:
            pass
        killer.join()
        world.edge.start()
        again = client_of(world.edge).chat.completions.create(**body, extra_body={**EXACT, "prefer": "private"}, extra_headers=headers)
        assert text_of(again) == whole and again.usage.completion_tokens == 80
    assert found(needles_of(world.edge, PROMPT), world.relay.sent()) == []


def test_what_cannot_be_private_says_so(tmp_path):
    w = World(tmp_path, layers=4)
    try:
        with pytest.raises(openai.BadRequestError) as e:
            ask(w.edge)
        assert "--private-min-layers" in str(e.value)
        _, normal = ask(w.edge, prefer="latency")
        assert text_of(normal)
        with pytest.raises(openai.BadRequestError) as e:
            ask(w.edge, prefer="secret")
        assert "prefer" in str(e.value)
    finally:
        w.close()


def test_private_by_default(tmp_path):
    w = World(tmp_path, extra=["--prefer", "private", "--private-min-layers", "4"])
    try:
        ask(w.edge, prefer=None)
        assert found(needles_of(w.edge, PROMPT), w.relay.sent()) == []
    finally:
        w.close()
