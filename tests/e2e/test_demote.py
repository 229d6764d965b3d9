"""A disk that is too small for a prompt keeps more of it where the tenant allows that cold blocks are stored at L1, and says what they are: who asks for
`exact` gets none of them, and nobody gets another tenant's.

How much is kept is what a node that has just been started says in OPEN_ACK. How much of that a reply takes is another matter: what is read late is computed."""
import os

from conftest import client_of
from harness import Cloud, wait_until
from mini_edge import BLOCK, OPEN_ACK, MiniEdge

DAYS = [f"On day {i} the fox went {i * 7 % 40} steps to the well and drank." for i in range(108)]
LIMIT = 24 << 20
EXACT, VISIBLE_LOSSLESS, ANY = range(3)
DEMOTED = 'tandem_kv_tier_demotions_total{tier="disk"}'


def story(days=len(DAYS)):
    return "This is the log of a long journey. " + " ".join(DAYS[:days])


def ask(cloud, token, text=story(), tokens=16, **extra):
    r = client_of(cloud, token, cloud.ca).completions.create(model="default", prompt=text, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True, **extra})
    return r.choices[0].text, r.usage


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


def kept(cloud, token, accept=VISIBLE_LOSSLESS, text=story()):
    """Leading tokens of the text whose KV the node has."""
    ids = client_of(cloud, token, cloud.ca)._client.post(cloud.url + "/tokenize", json={"content": text}, headers={"Authorization": f"Bearer {token}"}).json()["tokens"]
    edge = MiniEdge(cloud, token)
    told = edge.expect(OPEN_ACK, stream=edge.open(ids, accept=accept))
    edge.close()
    return told.get(3, 0)


def small_cloud(path, *extra):
    """Room for some three fifths of the story as it is; nothing of it stays in memory over a restart."""
    c = Cloud(path, extra=["--store-size", str(LIMIT), "--store-ram", "0", *extra])
    c.token, c.other = c.new_token(), c.new_token(tenant="bank", principal="bob")
    return c.start()


def acme(stat):
    return next(t for t in stat["tenants"] if t["tenant"] == "acme")


def tell(cloud, demotes, **extra):
    """The story in parts, as a text grows. What is stored with each is less than what lies between where demotion begins and where eviction does, and it is
    waited for until all has been stored, and demoted where that is due."""
    for days in range(6, len(DAYS) + 1, 6):
        before = cloud.store_stat()
        reply, usage = ask(cloud, cloud.token, story(days), tokens=16 if days == len(DAYS) else 1, **extra)
        blocks = (usage.total_tokens - 1) // BLOCK - cached(usage) // BLOCK

        def is_done():
            stat = cloud.store_stat()
            stored = stat["puts"] + stat["put_failures"] - before["puts"] - before["put_failures"] >= blocks
            return stored and not (demotes and acme(stat)["lossless"] and stat["segment_bytes"] > LIMIT // 4 * 3)

        assert wait_until(is_done), (days, blocks, before, cloud.store_stat())
    return reply


def restarted(cloud):
    assert cloud.stop() == 0
    cloud.start()


def read_back(cloud, text):
    """The reply from KV of the disk, all of it. A node waits for reads as long as computing would take, once it knows how long that is: here long."""
    cloud.env["TANDEM_PACED_LAYER_US"] = "1000"
    for _ in range(5):
        restarted(cloud)
        ask(cloud, cloud.token, "Wind and rain. " * 20, tokens=1, cache=False)
        reply, usage = ask(cloud, cloud.token, text)
        if cached(usage) == (usage.prompt_tokens - 1) // BLOCK * BLOCK:
            return reply
    raise AssertionError(f"{cached(usage)} of {usage.prompt_tokens} tokens were read in time")


def test_a_small_disk_keeps_more(tmp_path):
    there, replies, beginning = {}, {}, story(48)
    for name, extra in (("off", ()), ("on", ("--store-demote", "acme"))):
        c = small_cloud(tmp_path / name, *extra)
        try:
            replies[name] = tell(c, demotes=name == "on"), ask(c, c.token, beginning)[0]
            demoted = c.store_stat()["demotions"]
            counted = c.metrics()[DEMOTED]  # housekeeping may do one more at any moment
            stat = c.store_stat()
            assert demoted <= counted <= stat["demotions"]
            assert stat["segment_bytes"] <= LIMIT
            assert demoted > 0 if name == "on" else demoted == 0 and stat["evictions"] > 0
            tenant = acme(stat)
            assert tenant["lossless"] + tenant["l1"] == tenant["blocks"] and (tenant["l1"] > 0) == (name == "on")
            restarted(c)
            there[name] = kept(c, c.token)
            again = read_back(c, beginning)
            # Greedy: without demotion the same bits; with it, as long as the choice is not between two that are as good as equal.
            same = os.path.commonprefix((again, replies[name][1]))
            assert same == again if name == "off" else len(same.split()) >= 3, (again, replies[name])
        finally:
            c.kill()
    assert replies["on"] == replies["off"]
    assert there["on"] >= there["off"] + 256, there


def test_exact_and_others_get_none_of_it(tmp_path):
    c = small_cloud(tmp_path, "--store-demote", "acme,bank=off")
    try:
        reply = tell(c, demotes=True, fidelity="exact")
        restarted(c)
        assert kept(c, c.token, EXACT) < kept(c, c.token, VISIBLE_LOSSLESS) == kept(c, c.token, ANY), "A's own, and more of it than exact lets it have"
        assert kept(c, c.other, ANY) == 0
        again, usage = ask(c, c.token, fidelity="exact")
        assert again == reply
        # What a tenant without demotion has takes its place as it is.
        _, usage = ask(c, c.other, story(36))
        assert cached(usage) == 0
        assert wait_until(lambda: any(t["tenant"] == "bank" and t["blocks"] > 0 for t in c.store_stat()["tenants"]))
        for tenant in c.store_stat()["tenants"]:
            assert tenant["tenant"] != "bank" or tenant["lossless"] == tenant["blocks"]
        restarted(c)
        assert kept(c, c.other, ANY) <= usage.prompt_tokens, "its own at most"
    finally:
        c.kill()


def test_a_level_that_shows_is_refused(tmp_path):
    c = Cloud(tmp_path, extra=["--store-demote", "acme=l2"])
    c.start(wait=False)
    assert c.process.wait(600) != 0
    assert "--store-demote: codec l2 is not used with this model" in c.log()
