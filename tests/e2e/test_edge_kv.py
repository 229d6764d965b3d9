"""The device's own KV of layers [0, k) on its disk: after a restart, or with no room in memory, a later turn computes its new tokens only."""
import shutil
import time

import pytest

from conftest import client_of
from harness import Cloud, Edge

NOTES = "Here are my notes. " + " ".join(f"On day {i} the fox went {i * 7 % 40} steps to the well and drank." for i in range(125))
FIRST = dict(model="default", messages=[{"role": "user", "content": NOTES}], temperature=0.8, seed=3, max_tokens=40)
SHORT = {**FIRST, "messages": [{"role": "user", "content": NOTES[:2400]}]}
SECOND = dict(model="default", messages=[{"role": "user", "content": "What did the fox do on day 9? " * 8}], temperature=0.8, seed=4, max_tokens=24)
EXACT = {"ignore_eos": True, "fidelity": "exact"}
WRITTEN, READ, COMPUTED = "tandem_edge_kv_disk_written_total", "tandem_edge_kv_disk_read_total", "tandem_edge_prefill_tokens_total"


def first_turn(edge, ask=SHORT):
    """Its conversation and length; everything whole is on the disk then."""
    r = client_of(edge).chat.completions.with_raw_response.create(**ask, extra_body=EXACT)
    total = r.parse().usage.total_tokens
    until = time.monotonic() + 30
    while edge.metrics()[WRITTEN] < (total - 1) // 64 and time.monotonic() < until:
        time.sleep(0.05)
    assert edge.metrics()[WRITTEN] >= (total - 1) // 64
    return r.headers["x-conversation-id"], total


def second_turn(edge, conversation):
    before = edge.metrics()
    r = client_of(edge).chat.completions.create(**SECOND, extra_body={**EXACT, "conversation": conversation})
    after = edge.metrics()
    return r, after[COMPUTED] - before[COMPUTED], after.get(READ, 0) - before.get(READ, 0)


@pytest.fixture
def cloud(tmp_path):
    c = Cloud(tmp_path / "c")
    c.token = c.new_token()
    c.start()
    yield c
    c.kill()


def new_edge(tmp_path, cloud, name="e", extra=(), **settings):
    return Edge(tmp_path / name, cloud, settings.pop("token", cloud.token), 8, extra=["--codec", "l0", "--hidden", "f32", *extra], **settings).start()


def fork(edge, tmp_path, cloud, name, **settings):
    """Another edge that begins with a copy of this one's folder."""
    shutil.copytree(edge.dir / "data", tmp_path / name / "data", dirs_exist_ok=True)
    return new_edge(tmp_path, cloud, name, **settings)


def test_only_new_tokens_after_a_restart(tmp_path, cloud):
    edge = new_edge(tmp_path, cloud)
    conversation, total = first_turn(edge, FIRST)
    assert total > 2000
    assert edge.stop() == 0
    restarted = fork(edge, tmp_path, cloud, "restarted")
    forgetful = fork(edge, tmp_path, cloud, "forgetful", extra=["--kv-disk", "0"])
    try:
        got, computed, read = second_turn(restarted, conversation)
        cached = got.usage.prompt_tokens_details.cached_tokens
        assert cached == (total - 1) // 64 * 64, "the cloud has all whole blocks of the first turn"
        assert computed == got.usage.prompt_tokens - cached, "and the device too"
        assert read == cached // 64
        want, _, read = second_turn(forgetful, conversation)
        assert read == 0
        assert got.choices[0].message.content == want.choices[0].message.content
    finally:
        restarted.kill()
        forgetful.kill()


def test_more_than_memory_holds(tmp_path, cloud):
    """Room for 16 blocks: another conversation drives the first one out; it comes back from the disk."""
    edge = new_edge(tmp_path, cloud, extra=["--kv-memory", str(16 * 393216)])
    try:
        conversation, total = first_turn(edge)
        other = {**FIRST, "messages": [{"role": "user", "content": NOTES[::-1][:1600]}]}
        client_of(edge).chat.completions.create(**other, extra_body=EXACT)
        got, computed, read = second_turn(edge, conversation)
        assert read > 0
        assert computed == got.usage.prompt_tokens - got.usage.prompt_tokens_details.cached_tokens
    finally:
        edge.kill()


def test_nobody_elses(tmp_path, cloud):
    """The same prompt under another principal: nothing of the first one's is found, though it lies on the same disk."""
    edge = new_edge(tmp_path, cloud)
    first_turn(edge)
    assert edge.stop() == 0
    bob = fork(edge, tmp_path, cloud, "bob", token=cloud.new_token(principal="bob"))
    try:
        r = client_of(bob).chat.completions.create(**SHORT, extra_body=EXACT)
        after = bob.metrics()
        assert after.get(READ, 0) == 0
        assert r.usage.prompt_tokens_details.cached_tokens == 0 and after[COMPUTED] == r.usage.prompt_tokens
    finally:
        bob.kill()


def test_damaged_is_computed_again(tmp_path, cloud):
    edge = new_edge(tmp_path, cloud)
    first_turn(edge)
    assert edge.stop() == 0
    again = {**SHORT, "messages": [*SHORT["messages"], {"role": "assistant", "content": "I see."}, *SECOND["messages"]]}
    want = client_of(edge.start()).chat.completions.create(**again, extra_body=EXACT)
    assert edge.metrics()[READ] > 0
    assert edge.stop() == 0
    for path in (edge.dir / "data/store").glob("seg-*.td"):
        data = bytearray(path.read_bytes())
        for at in range(8192 + 100, len(data), 4096):
            data[at] ^= 1
        path.write_bytes(data)
    try:
        got = client_of(edge.start()).chat.completions.create(**again, extra_body=EXACT)
        assert edge.metrics().get(READ, 0) == 0
        assert got.choices[0].message.content == want.choices[0].message.content
    finally:
        edge.kill()
