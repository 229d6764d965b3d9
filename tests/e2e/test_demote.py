"""A disk that is too small for a conversation keeps more of it where the tenant allows that cold blocks are stored at L1, and says what they are:
who asks for `exact` gets none of them, and nobody gets another tenant's."""
import json
import os
import subprocess
import time

from conftest import client_of
from harness import BIN, Cloud

DAYS = [f"On day {i} the fox went {i * 7 % 40} steps to the well and drank." for i in range(108)]
DEMOTED = 'tandem_kv_tier_demotions_total{tier="disk"}'


def story(days=len(DAYS)):
    return "This is the log of a long journey. " + " ".join(DAYS[:days])


def ask(cloud, token, text=story(), **extra):
    r = client_of(cloud, token, cloud.ca).chat.completions.create(model="default", messages=[{"role": "user", "content": text}], max_tokens=16,
                                                                temperature=0, extra_body=extra)
    return r.choices[0].message.content, r.usage.prompt_tokens_details.cached_tokens


def small_cloud(path, *extra):
    """Room for some three fifths of the story as it is; nothing of it stays in memory over a restart."""
    c = Cloud(path, extra=["--store-size", "24M", "--store-ram", "0", *extra])
    c.token, c.other = c.new_token(), c.new_token(tenant="bank", principal="bob")
    return c.start()


def tell(cloud, **extra):
    """The story in parts, as a conversation grows: what is stored with each is less than a full disk can take at once."""
    for days in range(12, len(DAYS) + 1, 12):
        reply, _ = ask(cloud, cloud.token, story(days), **extra)
        figures = settle(cloud)
    return reply, figures


def store(cloud, command):
    r = subprocess.run([BIN / "tandem", "store", command, "--admin", f"http://127.0.0.1:{cloud.admin_port}", "--store-key-file", cloud.dir / "store.key",
                        "--json"], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(r.stdout)


def settle(cloud):
    """Nothing more is demoted or evicted."""
    seen, since, until = None, time.monotonic(), time.monotonic() + 60
    while time.monotonic() < until and time.monotonic() - since < 0.5:
        stat = store(cloud, "stat")
        now = (stat["demotions"], stat["evictions"], stat["segment_bytes"])
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)
    return seen


def restarted(cloud):
    assert cloud.stop() == 0
    cloud.start()


def read_back(cloud, enough):
    """The story asked for again after a start: the reply, and how much came from the disk. What would be sooner computed than read is, so computing is slow
    now; it may take another try all the same."""
    cloud.env["TANDEM_PACED_LAYER_US"] = "150"
    for _ in range(4):
        restarted(cloud)
        reply, cached = ask(cloud, cloud.token)
        if cached >= enough:
            break
        settle(cloud)
    return reply, cached


def test_a_small_disk_keeps_more(tmp_path):
    kept, replies = {}, {}
    for name, extra in (("off", ()), ("on", ("--store-demote", "acme"))):
        c = small_cloud(tmp_path / name, *extra)
        try:
            replies[name], (demoted, evicted, size) = tell(c)
            assert size <= 24 << 20
            assert demoted > 0 if name == "on" else demoted == 0 and evicted > 0
            counted = c.metrics()[DEMOTED]  # housekeeping may do one more at any moment
            stat = store(c, "stat")
            assert demoted <= counted <= stat["demotions"]
            tenant = stat["tenants"][0]
            assert tenant["lossless"] + tenant["l1"] == tenant["blocks"] and (tenant["l1"] > 0) == (name == "on")
            again, kept[name] = read_back(c, kept["off"] + 256 if name == "on" else 256)
            # Greedy: without demotion the same bits; with it, as long as the choice is not between two that are as good as equal.
            same = os.path.commonprefix((again, replies[name]))
            assert same == again if name == "off" else len(same.split()) >= 3, (again, replies[name])
        finally:
            c.kill()
    assert replies["on"] == replies["off"]
    assert kept["on"] >= kept["off"] + 256, kept


def test_exact_and_others_get_none_of_it(tmp_path):
    c = small_cloud(tmp_path, "--store-demote", "acme,bank=off")
    try:
        reply, (demoted, _, _) = tell(c, fidelity="exact")
        assert demoted > 0
        kept = read_back(c, 256)[1]  # now: the whole computed at `exact` puts better copies in the place of these, as far as there is room
        restarted(c)
        assert ask(c, c.other, story(36))[1] == 0
        settle(c)
        again, exact = ask(c, c.token, fidelity="exact")
        assert again == reply
        assert exact < kept, "control: A's own, and more of it than exact lets it have"
        settle(c)
        for tenant in store(c, "stat")["tenants"]:
            assert tenant["tenant"] != "bank" or tenant["lossless"] == tenant["blocks"]
        restarted(c)
        assert ask(c, c.other, story(24), fidelity="any")[1] <= 12 * 64  # its own at most
    finally:
        c.kill()


def test_a_level_that_shows_is_refused(tmp_path):
    c = Cloud(tmp_path, extra=["--store-demote", "acme=l2"])
    c.start(wait=False)
    assert c.process.wait(60) != 0
    assert "--store-demote: codec l2 is not used with this model" in c.log()
