"""Mixed load with clients that leave, links that break, evictions at every tier: when it is over nothing is held that nobody asked for, and memory is flat.

TANDEM_LEAK_SECONDS (20) says how long; an hour is what the long run takes. The load stops now and then; each time every page that is in use must be one of
the cache's, no stream, generation or queued byte may be left, and the descriptors must be as many as before.

Memory is sampled sixty times in the run, each minute in an hour. Judged is what belongs to the process (RssAnon and RssShmem): its median in the last quarter may
be at most GROWTH above that of the second quarter, of the time in which every tier evicts. Pages of files (RssFile) are the mapped model, which come in as its tensors are touched and go when the machine
wants memory; they are written down and not judged. Neither is what the tiers' policies take by their own account (tandem_kv_tier_policy_bytes): they remember 65,536
blocks that went, which takes longer than an hour to come by; that it ends there is a unit test's matter (test_policy). All samples are in TANDEM_LEAK_RESULT when it
is named."""
import contextlib
import json
import os
import pathlib
import random
import ssl
import threading
import time

import httpx

from harness import WAIT_SECONDS, Cloud, Edge, Relay
from test_cli import tandem

SECONDS = int(os.environ.get("TANDEM_LEAK_SECONDS", "20"))
RESULT = os.environ.get("TANDEM_LEAK_RESULT")
ROUNDS, CLIENTS = 12 if SECONDS >= 600 else 6, 4
TOPICS = [f"Tell me about the {what} of {where}." for what in ("rivers", "hills", "birds", "towns", "songs") for where in ("Wales", "Peru", "Japan", "Kenya")]
GROWTH = (4 if SECONDS >= 1800 else 64) << 20  # in a short run caches and allocators are still filling


class Client(threading.Thread):
    """One client at a time, of many: whole replies, replies left in the middle or before they begin, turns, deletes, nonsense."""

    def __init__(self, number, seed, edge_url, cloud):
        super().__init__(daemon=True)
        self.random, self.edge_url, self.cloud, self.number = random.Random(seed), edge_url, cloud, number
        self.edge = httpx.Client(base_url=edge_url, timeout=60, trust_env=False)
        self.direct = httpx.Client(base_url=cloud.url, timeout=60, trust_env=False, verify=ssl.create_default_context(cafile=cloud.ca), headers={"Authorization": f"Bearer {cloud.token}"})
        self.go, self.done, self.wrong, self.leave = threading.Event(), {}, [], False
        self.idle = threading.Event()

    def run(self):
        while not self.leave:
            self.idle.set()
            self.go.wait()
            self.idle.clear()
            if self.go.is_set():  # still: who looks at `idle` after it has cleared `go` finds this thread at rest, or waits for it
                self.ask()

    def ask(self):
        what = self.random.choice((self.whole, self.whole, self.left, self.left_early, self.turns, self.nonsense))
        try:
            what()
            self.done[what.__name__] = self.done.get(what.__name__, 0) + 1
        except httpx.HTTPError as e:  # a link was cut under a direct client; agents mend theirs
            self.wrong.append(f"{what.__name__}: {e!r}")

    def http(self):
        return self.random.choice((self.edge, self.edge, self.direct))

    def body(self, **more):
        words = self.random.choice(TOPICS) + " Say more." * self.random.choice((1, 20, 60, 120)) + (f" {self.random.random()}" if self.random.random() < 0.5 else "")
        return {"model": "default", "messages": [{"role": "user", "content": words}], "max_tokens": self.random.choice((1, 8, 40)), "temperature": 0.8,
                "seed": self.random.randrange(4), **more}

    def whole(self):
        self.http().post("/v1/chat/completions", json=self.body())

    def read(self, lines):
        with self.http().stream("POST", "/v1/chat/completions", json=self.body(stream=True, ignore_eos=True, max_tokens=400)) as r:
            for i, _ in enumerate(r.iter_lines()):
                if i >= lines:
                    break  # and the connection is closed

    def left(self):
        self.read(self.random.randrange(1, 30))

    def left_early(self):
        try:
            self.http().post("/v1/chat/completions", json=self.body(max_tokens=200), timeout=self.random.uniform(0.005, 0.3))
        except httpx.TimeoutException:
            pass

    def turns(self):
        http, conversation = self.http(), f"c-{self.number}-{self.random.randrange(10 ** 9)}"
        for _ in range(self.random.randrange(1, 4)):
            http.post("/v1/chat/completions", json=self.body(conversation=conversation))
        http.delete(f"/v1/conversations/{conversation}")

    def nonsense(self):
        http = self.http()
        http.post("/v1/chat/completions", json={"messages": "?"})
        http.post("/v1/chat/completions", json=self.body(max_tokens=-1))
        http.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})


def resident(program):
    """Bytes in memory: the process's own but for its policies' entries, these, and pages of files."""
    lines = dict(line.split(":") for line in pathlib.Path(f"/proc/{program.process.pid}/status").read_text().splitlines())
    anon, file, shmem = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem"))
    policy = int(sum(value for name, value in program.metrics().items() if name.startswith("tandem_kv_tier_policy_bytes")))
    return {"own": anon + shmem - policy, "policy": policy, "file": file}


class Memory(threading.Thread):
    """Samples of every program's memory."""

    def __init__(self, **programs):
        super().__init__(daemon=True)
        self.programs, self.samples, self.over, self.first = programs, [], threading.Event(), 0

    def run(self):
        begun = time.monotonic()
        while not self.over.wait(SECONDS / 60):
            with contextlib.suppress(OSError):  # a program that is too busy to say its figures: one sample less
                self.samples.append({"s": round(time.monotonic() - begun, 1), **{name: resident(p) for name, p in self.programs.items()}})

    def quarter(self, name, number):
        """The median of a quarter of the samples from `first` on."""
        samples = self.samples[self.first:]
        part = len(samples) // 4
        return median([s[name]["own"] for s in samples[number * part:(number + 1) * part]])


def descriptors(program):
    """Open files and sockets but the log's segments, of which the store keeps a bounded number open."""
    names = []
    for fd in os.listdir(f"/proc/{program.process.pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{program.process.pid}/fd/{fd}"))
        except OSError:
            pass
    return sum("/seg-" not in name for name in names)


def held(cloud, edge):
    """What is held that an idle system holds no more; {} is what it should be."""
    c, e = cloud.metrics(), edge.metrics()
    found = {name: c[name] for name in ("tandem_requests_running", "tandem_requests_waiting", "tandem_edge_streams",
                                        "tandem_store_queue_bytes") if c[name]}
    if e["tandem_edge_requests_running"]:
        found["tandem_edge_requests_running"] = e["tandem_edge_requests_running"]
    if c["tandem_kv_pages_used"] != c["tandem_kv_pages_cached"]:
        found["pages"] = c["tandem_kv_pages_used"] - c["tandem_kv_pages_cached"]
    return found


def at_rest(cloud, edge):
    """What is held still, though nobody asks for anything: figures are published once a second, so they are good once they have been for longer than that."""
    since = until = time.monotonic()
    until += 4 * WAIT_SECONDS
    while time.monotonic() < until and time.monotonic() - since < 1.2:
        if found := held(cloud, edge):
            since = time.monotonic()
        time.sleep(0.1)
    return found


def done_by(clients):
    return {k: sum(c.done.get(k, 0) for c in clients) for k in ("whole", "left", "left_early", "turns", "nonsense")}


def was_a_load(clients, samples):
    """Mixed, and something had to go at every tier."""
    return all(done_by(clients).values()) and all(samples[-1]["evicted"].values())


def median(values):
    return sorted(values)[len(values) // 2]


def test_nothing_is_left(tmp_path):
    seed = int(os.environ.get("TANDEM_SEED", time.time()))
    print("seed", seed)
    # Small everywhere, so that pages, memory tier, disk, device memory and device disk all evict within seconds.
    cloud = Cloud(tmp_path / "c", extra=["--pages", "48", "--store-ram", "8M", "--store-size", "64M", "--context", "1024"])
    cloud.token = cloud.new_token()
    cloud.start()
    relay = Relay(cloud.port)
    edge = Edge(tmp_path / "e", cloud, cloud.token, 8, extra=["--kv-memory", "24M", "--kv-disk", "32M"], cloud_port=relay.port).start()
    clients = [Client(i, seed + i, edge.url, cloud) for i in range(CLIENTS)]
    cutting, admin = random.Random(seed), ("--admin", f"http://127.0.0.1:{cloud.admin_port}", "--store-key-file", cloud.dir / "store.key", "--json")
    samples, begun, memory = [], time.monotonic(), Memory(cloud=cloud, edge=edge)
    try:
        memory.start()
        for c in clients:
            c.start()
        full = None  # the rest from which on every tier evicts: before it caches fill, on a slow machine for long
        while len(samples) < ROUNDS or (len(samples) < 8 * ROUNDS and (full is None or len(samples) < full + ROUNDS // 2 or not was_a_load(clients, samples))):
            until = time.monotonic() + SECONDS / ROUNDS
            for c in clients:
                c.go.set()
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, cutting.uniform(1, 8)))
                relay.cut()
                time.sleep(cutting.uniform(0, 0.5))
                relay.restore()
            for c in clients:
                c.go.clear()
            for c in clients:
                assert c.idle.wait(600), "a request does not end"
            found = at_rest(cloud, edge)
            m, store = cloud.metrics(), json.loads(tandem("store", "stat", *admin).stdout)
            samples.append({"s": round(time.monotonic() - begun), "held": found, "cloud": resident(cloud), "edge": resident(edge), "cloud_fds": descriptors(cloud),
                            "edge_fds": descriptors(edge), "done": sum(sum(c.done.values()) for c in clients),
                            "evicted": {"ram": m['tandem_kv_tier_evictions_total{tier="ram"}'], "disk": store["evictions"]},
                            "pages": m["tandem_kv_pages_used"]})
            if full is None and all(samples[-1]["evicted"].values()):
                full, memory.first = len(samples), len(memory.samples)
            print(json.dumps(samples[-1]), flush=True)
            if RESULT:
                pathlib.Path(RESULT).write_text(json.dumps({"rests": samples, "memory": memory.samples}))
        assert not any(s["held"] for s in samples), samples
        assert was_a_load(clients, samples), (done_by(clients), samples[-1])
        warm = samples[ROUNDS // 2 - 1:]  # before that caches fill
        for name in ("cloud", "edge"):
            second, last = memory.quarter(name, 1), memory.quarter(name, 3)
            print(name, "second quarter", second, "last", last, flush=True)
            assert last <= second + GROWTH, (name, second, last)
            assert samples[-1][f"{name}_fds"] <= max(s[f"{name}_fds"] for s in warm[:3]) + 4, name
    finally:
        memory.over.set()
        for c in clients:
            c.leave = True
            c.go.set()
        edge.kill()
        relay.close()
        cloud.kill()
