"""The device's own KV of layers [0, k) on its disk: after a restart, or with no room in memory, a later turn computes its new tokens only.

A disk that answers late counts as empty, and on a busy machine it may: what is to be read is tried again, each time from the same state, in the end by a
device that takes longer to compute than any disk to read."""
import shutil

import pytest

from conftest import client_of
from harness import Cloud, Edge, wait_until

NOTES = "Here are my notes. " + " ".join(f"On day {i} the fox went {i * 7 % 40} steps to the well and drank." for i in range(125))
FIRST = dict(model="default", messages=[{"role": "user", "content": NOTES}], temperature=0.8, seed=3, max_tokens=40)
SHORT = {**FIRST, "messages": [{"role": "user", "content": NOTES[:2400]}]}
QUESTION, SECOND = "What did the fox do on day 9? " * 8, dict(model="default", temperature=0.8, seed=4, max_tokens=24)
EXACT = {"ignore_eos": True, "fidelity": "exact"}
ATTEMPTS = 8
WRITTEN, READ, COMPUTED = "tandem_edge_kv_disk_written_total", "tandem_edge_kv_disk_read_total", "tandem_edge_prefill_tokens_total"


def first_turn(edge, ask=SHORT):
    """Its conversation and length; everything whole is on the disk then."""
    before = edge.metrics().get(WRITTEN, 0)
    r = client_of(edge).chat.completions.with_raw_response.create(**ask, extra_body=EXACT)
    total = r.parse().usage.total_tokens
    assert wait_until(lambda: edge.metrics()[WRITTEN] - before >= (total - 1) // 64)
    return r.headers["x-conversation-id"], total


def second_turn(edge, conversation, attempt):
    """The reply, how many tokens the device computed, how many blocks it read, and whether the tokens were the new ones only."""
    before = edge.metrics()
    r = client_of(edge).chat.completions.create(**SECOND, messages=[{"role": "user", "content": f"{attempt}. {QUESTION}"}],
                                                extra_body={**EXACT, "conversation": conversation})
    after = edge.metrics()
    computed, read = after[COMPUTED] - before[COMPUTED], after.get(READ, 0) - before.get(READ, 0)
    return r, computed, read, computed == r.usage.prompt_tokens - r.usage.prompt_tokens_details.cached_tokens


@pytest.fixture
def cloud(tmp_path):
    c = Cloud(tmp_path / "c")
    c.token = c.new_token()
    c.start()
    yield c
    c.kill()


def new_edge(tmp_path, cloud, name="e", extra=(), pace={}, token=None):
    edge = Edge(tmp_path / name, cloud, token or cloud.token, 8, extra=["--codec", "l0", "--hidden", "f32", *extra])
    edge.env.update(pace)
    return edge.start()


def fork(edge, tmp_path, cloud, name, **settings):
    """Another edge that begins with a copy of this one's folder."""
    shutil.copytree(edge.dir / "data", tmp_path / name / "data", dirs_exist_ok=True)
    return new_edge(tmp_path, cloud, name, **settings)


def slower(attempt):
    """What makes a device so, after some vain attempts."""
    return {"TANDEM_PACED_LAYER_US": "1000"} if attempt >= 3 else {}


def measure(edge):
    """It has computed something: a read is then waited for as long as that takes here, and not as long as is guessed."""
    client_of(edge).chat.completions.create(**{**FIRST, "messages": [{"role": "user", "content": NOTES[700:1500]}]}, extra_body={**EXACT, "cache": False})


def test_only_new_tokens_after_a_restart(tmp_path, cloud):
    edge = new_edge(tmp_path, cloud)
    conversation, total = first_turn(edge, FIRST)
    assert total > 2000
    assert edge.stop() == 0
    for attempt in range(ATTEMPTS):
        restarted = fork(edge, tmp_path, cloud, f"restarted{attempt}", pace=slower(attempt))
        try:
            if attempt:
                measure(restarted)
            got, computed, read, only_new = second_turn(restarted, conversation, attempt)
        finally:
            restarted.kill()
        cached = got.usage.prompt_tokens_details.cached_tokens
        assert cached == (total - 1) // 64 * 64, "the cloud has all whole blocks of the first turn"
        if only_new:
            break
    assert only_new, (computed, "and the device too")
    assert read == cached // 64
    forgetful = fork(edge, tmp_path, cloud, "forgetful", extra=["--kv-disk", "0"])
    try:
        want, _, read, _ = second_turn(forgetful, conversation, attempt)
        assert read == 0
        assert got.choices[0].message.content == want.choices[0].message.content
    finally:
        forgetful.kill()


def test_more_than_memory_holds(tmp_path, cloud):
    """Room for 16 blocks: another conversation drives the first one out; it comes back from the disk."""
    edge = new_edge(tmp_path, cloud, extra=["--kv-memory", str(16 * 393216)])
    try:
        for attempt in range(ATTEMPTS):
            if slower(attempt) and edge.stop() == 0:
                edge.env.update(slower(attempt))
                edge.start()
            conversation, _ = first_turn(edge, {**FIRST, "messages": [{"role": "user", "content": f"{attempt}. {NOTES[:2400]}"}]})
            other = {**FIRST, "messages": [{"role": "user", "content": f"{attempt}. {NOTES[::-1][:1600]}"}]}
            client_of(edge).chat.completions.create(**other, extra_body=EXACT)
            _, computed, read, only_new = second_turn(edge, conversation, attempt)
            if read > 0 and only_new:
                break
        assert read > 0 and only_new, (read, computed)
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
    again = {**SHORT, "messages": [*SHORT["messages"], {"role": "assistant", "content": "I see."}, {"role": "user", "content": QUESTION}]}
    for attempt in range(ATTEMPTS):
        edge.env.update(slower(attempt))
        edge.start()
        if attempt:
            measure(edge)
        want = client_of(edge).chat.completions.create(**again, extra_body=EXACT)
        read = edge.metrics().get(READ, 0)
        assert edge.stop() == 0
        if read > 0:
            break
    assert read > 0, "control"
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
