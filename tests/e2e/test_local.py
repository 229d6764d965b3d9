"""First tokens made on the device (--local): on a far link they are there before the cloud's, and nothing shows of who made which: text, log probabilities, finish and
usage are the cloud's own, whatever breaks meanwhile; both keep the same conversation."""
import concurrent.futures
import functools
import threading
import time

import pytest

from conftest import client_of
from harness import Cloud, Edge, Relay, Stack, wait_until

DELAY = 0.12  # seconds one way: some dozens of the device's tokens
PROMPT = [{"role": "user", "content": "Write a story about a fox and a well. " + "The fox is thirsty and the well is deep. " * 6}]
ASK = dict(model="default", messages=PROMPT, temperature=1.0, top_p=0.95, presence_penalty=0.3, seed=77, max_tokens=100, logit_bias={"33": -3}, logprobs=True, top_logprobs=2)
EXTRA = {"fidelity": "exact", "timings": True}


class World(Stack):
    def __init__(self, path, local="always", extra=(), cloud_pace="300", edge_pace=None):
        """Of the paces, microseconds a token and layer: a slow cloud, so that the device is first also on a busy machine."""
        self.cloud = Cloud(path / "c")
        self.cloud.env["TANDEM_PACED_LAYER_US"] = cloud_pace
        self.token, other = self.cloud.new_token(), self.cloud.new_token(principal="alone")
        self.cloud.start()
        self.relay = Relay(self.cloud.port, delay_s=DELAY)
        self.edge = Edge(path / "e", self.cloud, self.token, "auto", extra=["--local", local, *extra], cloud_port=self.relay.port)
        if edge_pace:
            self.edge.env["TANDEM_PACED_LAYER_US"] = edge_pace
        self.edge.start()
        self.client = client_of(self.edge)
        self.alone = client_of(self.cloud, other, self.cloud.ca)

def ask(client, extra=EXTRA, **more):
    """(text, probabilities, finish, tokens), timings"""
    r = client.chat.completions.create(**{**ASK, **more}, extra_body=extra)
    c = r.choices[0]
    probabilities = [(t.token, t.logprob, [(a.token, a.logprob) for a in t.top_logprobs]) for t in c.logprobs.content]
    return (c.message.content, probabilities, c.finish_reason, r.usage.completion_tokens), r.model_extra["timings"]


def hold_until_ahead(w, tokens, over):
    """The cloud is not heard before the device has made so many tokens, however busy the machine is."""
    def made():
        return w.edge.metrics().get("tandem_edge_local_tokens_total", 0)

    enough = made() + tokens
    w.relay.held = True

    def release():
        wait_until(lambda: made() >= enough or over.is_set())
        w.relay.held = False

    holder = threading.Thread(target=release)
    holder.start()
    return holder


def ask_ahead(w, tokens, *arguments, **more):
    """What a device says that has made so many tokens before it hears of the cloud."""
    over = threading.Event()
    holder = hold_until_ahead(w, tokens, over)
    try:
        return ask(w.client, *arguments, **more)
    finally:
        over.set()
        holder.join()


def test_nothing_shows(world):
    whole, _ = ask(world.alone)
    ask(world.client, max_tokens=1)  # connected
    got, timings = ask_ahead(world, 20, extra={**EXTRA, "cache": False})
    assert timings["plan"]["local"] and timings["local_tokens"] > 0, timings
    assert got == whole
    assert whole[3] == 100
    for tokens in (1, 3, 17):  # whole before the cloud has said anything
        got, timings = ask_ahead(world, tokens, max_tokens=tokens)
        assert got == ask(world.alone, max_tokens=tokens)[0]
        assert 0 < timings["local_tokens"] <= tokens
    for at in (0.1, 0.5, 0.9):  # stop strings: within the device's tokens, and perhaps behind them
        stop = whole[0][int(len(whole[0]) * at):][:12]
        got, timings = ask(world.client, stop=[stop])
        assert stop not in got[0] and got == ask(world.alone, stop=[stop])[0]
    got, _ = ask(world.client, temperature=0, messages=[{"role": "user", "content": "Say yes."}], logit_bias={"2": 100})  # an end token at once
    assert got[2] == "stop" and got[3] == 1
    assert world.edge.metrics()["tandem_edge_local_tokens_total"] > 20


def test_conversations_go_on(world):
    """Both sides keep the turn that the client saw, also one that was whole before the cloud had begun; the next one sends what is new only."""
    history = list(PROMPT)
    for turn, tokens in enumerate((5, 40, 4, 60)):
        stop = [" the"] if turn == 3 else None
        got, timings = ask(world.client, messages=history, max_tokens=tokens, stop=stop)
        assert got == ask(world.alone, messages=history, max_tokens=tokens, stop=stop)[0], turn
        history += [{"role": "assistant", "content": got[0]}, {"role": "user", "content": f"And then? ({turn})"}]
        # The cloud comes behind.
        assert wait_until(lambda: world.cloud.metrics().get('tandem_conversations_saved_total{door="edge"}', 0) == turn + 1), turn
    assert wait_until(lambda: world.edge.metrics()["tandem_edge_requests_running"] == 0)
    assert wait_until(lambda: world.cloud.metrics()["tandem_requests_running"] == 0)
    names = [c["id"] for c in world.client.get("/conversations", cast_to=object)["data"]]
    assert len(names) == 1


def test_auto_takes_it_where_it_pays(tmp_path):
    w = World(tmp_path, local="auto")
    try:
        for _ in range(10):  # what a busy machine does at one moment may say something else; it is measured anew with each
            got, timings = ask(w.client, extra={**EXTRA, "cache": False})
            estimates = timings["plan"].get("estimates", {})
            if timings["plan"]["local"] and estimates["edge_alone_first_token_ms"] < estimates["cloud_alone_first_token_ms"]:
                break
        assert timings["plan"]["local"], timings
        assert estimates["edge_alone_first_token_ms"] < estimates["cloud_alone_first_token_ms"]
        assert got == ask(w.alone)[0]
    finally:
        w.close()


def test_eight_at_once(world):
    asks = [dict(seed=i, max_tokens=30, messages=[{"role": "user", "content": f"Tell me about the number {i}. " + "Go on. " * 4 * i}]) for i in range(8)]
    alone = [ask(world.alone, **a)[0] for a in asks]  # one after the other
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        over = threading.Event()
        holder = hold_until_ahead(world, 1, over)
        together = list(pool.map(lambda a: ask(client_of(world.edge), **a), asks))
        over.set()
        holder.join()
    assert [got for got, _ in together] == alone
    assert sum(t["local_tokens"] for _, t in together) > 0


@pytest.mark.parametrize("what", ["cut", "kill"])
def test_breaks_meanwhile(world, what):
    """The link cut, or the cloud killed, while the device makes tokens, and when the cloud has overtaken it."""
    whole, _ = ask(world.alone)

    def disturb():
        if what == "kill":
            world.cloud.kill()
            world.cloud.start()
        else:
            world.relay.cut()
            time.sleep(0.3)
            world.relay.restore()

    for after in (0.02, 0.15, 0.3, 0.45):
        timer = threading.Timer(after, disturb)
        timer.start()
        got, _ = ask(world.client, extra={**EXTRA, "cache": False})
        timer.join()
        assert got == whole, after


def test_a_cloud_that_draws_others_goes_on_from_the_devices(tmp_path):
    """The cloud's KV of the prompt came from lossy uploads, the device's own is exact: where they differ, the client's text counts, each token once."""
    w = World(tmp_path)
    lossy = Edge(tmp_path / "lossy", w.cloud, w.token, 20, extra=["--codec", "l2", "--codec-unchecked", "--hidden", "int8"]).start()
    any_kind = {"fidelity": "any", "timings": True, "ignore_eos": True}
    more = dict(messages=[{"role": "user", "content": " ".join(f"Line {i}: {i * 7919 % 1000}." for i in range(14)) + " Go on."}], temperature=1.6, top_p=1.0)
    try:
        ask(client_of(lossy), extra=any_kind, **more)
        lossy.stop()
        w.relay.delay = 0.4
        for seed in range(20):
            got, timings = ask_ahead(w, 32, extra=any_kind, seed=seed, **more)
            made = timings["local_tokens"]
            assert got[3] == 100 and len(got[1]) == 100  # more than the device is ahead at most
            # Not kept: what the cloud computes exactly is what the tenant's requests find from then on, in the place of the lossy blocks.
            exact, _ = ask(w.alone, extra={**EXTRA, "ignore_eos": True, "cache": False}, seed=seed, **more)
            assert got[1][:made] == exact[1][:made]
            if "draws other tokens" in w.edge.log():
                break
        else:
            raise AssertionError("the two never differed")
    finally:
        lossy.kill()
        w.close()


# ---- without the cloud (--offline continue) ----

LONG = dict(max_tokens=200, logprobs=False, top_logprobs=None)


@pytest.fixture
def offline(tmp_path, request):
    """Both paced, so that no machine is through before what is to happen has; the device more, so that the cloud catches up with it."""
    cloud_pace, edge_pace = getattr(request, "param", ("150", "300"))
    w = World(tmp_path, local="off", extra=["--offline", "continue", "--codec", "l0", "--hidden", "f32"], cloud_pace=cloud_pace, edge_pace=edge_pace)
    w.relay.delay = 0
    yield w
    w.close()


def whole_text(client, **more):
    r = client.chat.completions.create(**{**ASK, **LONG, **more}, extra_body={**EXTRA, "ignore_eos": True, "cache": False})
    return r.choices[0].message.content, r.usage.completion_tokens, r.model_extra["timings"]


def cut_until_it_goes_on(w, over, seconds=0):
    """The link is there again after so long, once the device has made a token without it, or when the reply is over."""
    def made():
        return w.edge.metrics().get("tandem_edge_offline_tokens_total", 0)

    before = made()
    w.relay.cut()
    over.wait(seconds)
    wait_until(lambda: made() > before or over.is_set())
    w.relay.restore()


def test_a_cut_of_five_seconds_is_no_pause(offline):
    """The device goes on where the cloud stopped, and hands back; the text is the uninterrupted one, and the reply says so."""
    whole, count, _ = whole_text(offline.alone)
    over = threading.Event()
    timer = threading.Timer(0.5, cut_until_it_goes_on, [offline, over, 5])
    timer.start()
    text, tokens, timings = whole_text(offline.client)
    over.set()
    timer.join()
    assert (text, tokens) == (whole, count) and count == 200
    assert timings["offline"]["tokens"] > 0 and timings["offline"]["estimate_ms"] > 0, timings
    assert timings["offline"]["from_token"] + timings["offline"]["tokens"] <= 200


def test_handed_back(offline):
    more = dict(max_tokens=500)
    whole, _, _ = whole_text(offline.alone, **more)
    before = offline.cloud.metrics()["tandem_generated_tokens_total"]
    over = threading.Event()
    timer = threading.Timer(0.5, cut_until_it_goes_on, [offline, over])
    timer.start()
    text, tokens, timings = whole_text(offline.client, **more)
    over.set()
    timer.join()
    assert text == whole and tokens == 500
    made = timings["offline"]["tokens"]
    assert 0 < made < 500 and made == timings["local_tokens"], timings
    assert offline.cloud.metrics()["tandem_generated_tokens_total"] - before >= 500 - made


def test_a_link_that_falls_silent(offline):
    """Nothing says that it has broken, for as long as the reply takes: the device does without, in mid-prompt and in mid-reply."""
    whole, count, _ = whole_text(offline.alone)
    whole_text(offline.client, max_tokens=2)

    for after_s in (0.01, 0.5):
        timer = threading.Timer(after_s, setattr, [offline.relay, "held", True])
        timer.start()
        text, tokens, timings = whole_text(offline.client)
        timer.join()
        offline.relay.held = False
        assert (text, tokens) == (whole, count), after_s
        assert "offline" in timings, (after_s, timings, offline.edge.log())
        assert timings["offline"]["tokens"] > 0, (after_s, timings, offline.edge.log())
        linked(offline.edge)


def linked(edge):
    assert wait_until(lambda: edge.metrics()["tandem_edge_connected"])


@pytest.mark.parametrize("offline", [("200", None)], indirect=True, ids=["slow cloud"])  # of which the device takes work
@pytest.mark.parametrize("is_back", [False, True])
def test_a_break_in_mid_prompt(offline, is_back):
    """The link breaks while the prompt is sent: the device makes the reply from what it holds of it, and hands back, where the link returns in time."""
    notes = "Here are my notes. " + " ".join(f"On day {i} the fox went {i * 7 % 40} steps to the well and drank." for i in range(12))
    # Long enough that the device is not through before the cloud has caught up.
    more = dict(messages=[{"role": "user", "content": notes}], max_tokens=800 if is_back else 60)
    whole, count, _ = whole_text(offline.alone, **more)
    offline.relay.rate = 4_000_000
    begun = offline.relay.bytes_up
    text, _, timings = whole_text(offline.client, **more)
    total = offline.relay.bytes_up - begun
    assert text == whole and timings["plan"]["layers"] > 0, timings  # rows are sent
    for part in (0.02, 0.3):
        for _ in range(5):  # a plan for fewer bytes than the first may have come to an end before
            over = threading.Event()
            disturb = functools.partial(cut_until_it_goes_on, offline, over) if is_back else offline.relay.cut
            offline.relay.at_bytes(int(total * part), disturb)
            text, tokens, timings = whole_text(offline.client, **more)
            over.set()
            broke = offline.relay.fired()
            assert (text, tokens) == (whole, count), part
            offline.relay.restore()
            linked(offline.edge)
            if broke and timings.get("offline", {}).get("from_token") == 0:
                break
        assert broke and timings["offline"]["from_token"] == 0, (part, timings)
        assert (timings["offline"]["tokens"] == count) == (not is_back), (part, timings)


def test_a_cloud_that_is_away_from_the_start(offline):
    whole, count, _ = whole_text(offline.alone, max_tokens=60)
    whole_text(offline.client, max_tokens=2)  # it must have known the cloud once
    history = [{"role": "user", "content": "Name a river."}]
    first = ask(offline.client, messages=history)[0]
    offline.cloud.kill()
    offline.edge.stop()
    offline.edge.start()
    client = client_of(offline.edge)
    text, tokens, timings = whole_text(client, max_tokens=60)
    assert (text, tokens) == (whole, count)
    assert timings["offline"] == {"from_token": 0, "tokens": 60, "estimate_ms": timings["offline"]["estimate_ms"]}
    history += [{"role": "assistant", "content": first[0]}, {"role": "user", "content": "And another."}]
    second, timings = ask(client, messages=history)  # goes on with the conversation of before
    assert timings["offline"]["tokens"] == second[3]
    offline.cloud.start()
    history += [{"role": "assistant", "content": second[0]}, {"role": "user", "content": "And the longest?"}]
    assert wait_until(lambda: "offline" not in ask(client, messages=history)[1])
    assert len(client.get("/conversations", cast_to=object)["data"]) >= 1


def test_by_default_it_waits(tmp_path):
    w = World(tmp_path, local="off", extra=["--cloud-timeout", "2"])
    try:
        w.relay.delay = 0
        whole_text(w.client, max_tokens=2)
        w.relay.cut()
        with pytest.raises(Exception, match="could not be reached"):
            whole_text(w.client, max_tokens=5)
    finally:
        w.close()
