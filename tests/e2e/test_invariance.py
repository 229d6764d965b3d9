"""The invariance rule through the real programs: at fidelity exact, with f32 rows and lossless KV, nothing about how a prompt was computed shows in the reply.

Every case names k, codec, hidden dtype and where the prefix came from; the reference is the cloud alone, without cache. Logprobs are compared as they are
printed (all digits of the float), so equal text by luck is no pass."""
import pytest

from conftest import client_of
from harness import Cloud, Edge

TEXT = (
    "The harbour master keeps three books. The first lists every ship by name, the second by the day it came, and the third by what it carried. "
    "When a storm is expected he closes the gates, and the boats inside wait with doubled ropes. In the year of the great flood the water stood a metre "
    "above the quay, and all three books were carried to the church tower in a barrel. 海は静かです。 Les bateaux sont rentrés. ")
ASK = dict(temperature=0, max_tokens=24, logprobs=True, top_logprobs=3)


def messages(words=""):
    return [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": TEXT * 2 + words + "What does he do before a storm?"}]


def reply(client, content, cache=True, **more):
    r = client.chat.completions.create(model="default", messages=content, **{**ASK, **more}, extra_body={"cache": cache, "fidelity": "exact"})
    probabilities = [(t.token, t.logprob, [(a.token, a.logprob) for a in t.top_logprobs]) for t in r.choices[0].logprobs.content]
    return r.choices[0].message.content, probabilities, r.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def reference(cloud):
    text, probabilities, cached = reply(client_of(cloud, cloud.token, cloud.ca), messages(), cache=False)
    assert cached == 0
    return text, probabilities


@pytest.mark.parametrize("k,chunk,threads", [(0, 64, 2), (8, 64, 1), (15, 128, 2), (30, 64, 2)])
def test_edge_layers(tmp_path, cloud, reference, k, chunk, threads):
    """prefix: computed; k layers on the device, L0, f32 rows"""
    token = cloud.new_token(principal=f"k{k}")  # a principal of its own: nothing cached
    e = Edge(tmp_path, cloud, token, k, extra=["--codec", "l0", "--hidden", "f32", "--chunk", str(chunk), "--threads", str(threads)]).start()
    try:
        client = client_of(e)
        assert reply(client, messages(), cache=False)[:2] == reference
        text, probabilities, cached = reply(client, messages())  # own KV at the edge, cached blocks in the cloud's memory
        text, probabilities, cached = reply(client, messages())
        assert (text, probabilities) == reference and cached >= 64
    finally:
        assert e.stop() == 0, e.log()[-2000:]


@pytest.mark.parametrize("budget,threads", [(16, 1), (64, 2), (2048, 2)])
def test_chunks_and_threads(tmp_path, reference, budget, threads):
    """prefix: computed, in steps of `budget` rows; alone"""
    c = Cloud(tmp_path, extra=["--token-budget", str(budget), "--threads", str(threads)])
    token = c.new_token()
    c.start()
    try:
        assert reply(client_of(c, token, c.ca), messages(), cache=False)[:2] == reference
    finally:
        c.kill()


def test_memory_and_disk(tmp_path, reference):
    """prefix: from memory, then from disk after kill -9"""
    c = Cloud(tmp_path)
    token = c.new_token()
    c.start()
    client = client_of(c, token, c.ca)
    assert reply(client, messages())[:2] == reference
    text, probabilities, cached = reply(client, messages())
    assert (text, probabilities) == reference and cached >= 64
    c.settle(cached // 64)
    text, probabilities, cached = c.comes_back(lambda: reply(client, messages()), 64)
    assert (text, probabilities) == reference
    c.kill()


def test_lossy_is_not_exact(tmp_path, cloud, reference):
    """A reply computed from L1 pieces and f16 rows may differ, and its blocks are never a hit at fidelity exact."""
    token = cloud.new_token(tenant="lossy")  # a tenant of its own: nothing cached
    e = Edge(tmp_path, cloud, token, 8, extra=["--codec", "l1", "--hidden", "f16"]).start()
    try:
        client = client_of(e)
        for _ in range(2):
            r = client.chat.completions.create(model="default", messages=messages(), temperature=0, max_tokens=4)
        assert r.usage.prompt_tokens_details.cached_tokens >= 64  # the control: visible-lossless hits
        direct = client_of(cloud, token, cloud.ca)
        text, probabilities, cached = reply(direct, messages())
        assert (text, probabilities) == reference and cached == 0
    finally:
        assert e.stop() == 0
