#!/usr/bin/env python3
"""links.py: what links.sh measures, and how. Standard library only; run by links.sh, which has made the namespaces and built the relay.

Two network namespaces, a link of links_relay.c between them; tandem-cloud on one core, on the other the device: one tandem-edge for each split that is
measured (planner, cloud-only, fixed k), of which one at a time has work, and a tandem-cloud on loopback that stands for edge-only: the same engine on the
device's core without a link, asked through its own API. The client is in the device's namespace.

All connections are warm: every program has answered a prompt of the length, the planner WARM of them, before anything counts. Runs alternate: a round
asks each mode once, in an order that rotates, each time a prompt that nobody has seen; rounds are the pairs. A run that takes longer than STOP times the
better single side is cut off and counts as that long. Between runs the programs finish what they do behind a reply (read from their processor time).

Two cores of one machine are not two machines: what both compute at once takes longer than what one computes while the other is idle (they share memory's
bandwidth, and power), and the planner's runs are the only ones where both do. With --together the single sides are asked at the same time.

Paced, the model is a thin copy (links_model.py): the same bytes on the link, and computing that stays below its pace also beside other work.

`--drop`: the rate falls in the middle of a prompt, with paced computing. What could have been had by knowing it is reckoned (hindsight): the better single side,
or any split of what reaches the cloud before the fall, the rest from token ids.

ratio is the planner's median over the lower median of cloud-only and edge-only; ratio_low95 the lower end of a one-sided 95 % interval of the ratio's
geometric mean over the pairs (t on logarithms; with one pair the ratio itself)."""
import argparse
import concurrent.futures
import ctypes
import http.client
import json
import math
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import links_model
import links_report

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
EDGE_ADDRESS, CLOUD_ADDRESS = "10.77.0.1", "10.77.0.2"
CLOUD_PORT, CLOUD_ADMIN, LOCAL_PORT, LOCAL_ADMIN, EDGE_PORT = 8443, 9443, 8090, 9091, 8100
EDGE_CORE, CLOUD_CORE = "0", "1"
SINGLES = ("cloud-only", "edge-only")
TOKENS = 16  # of a reply: its last makes T16
STOP, STOP_FIRST_S = 3.0, 120.0
WARM = 2
QUICK_PACE_US, QUICK_LIMIT_S = "80", 28 * 60  # --quick: computing is paced unless told otherwise; no shape begins later
LAYERS, ROW_SIZE, KV_SIZE = 30, 1152, 390  # SmolLM2-135M: bytes a token, rows in f16, KV of a layer in L1
RATES, FIXED = [1, 5, 20, 100, 300, 1000], [0, 1, 2, 4, 8, 12, 15, 20, 25, 30]
T_95 = [0, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753]
WORDS = ("the of and to in is was for on that with as it by at from his an were are which this also be had or has first one their its new "
         "after but who not they have her she two been other when there all during into school time may years more most only over city").split()


def enter(namespace):
    """This thread, and what it starts, from now on."""
    with open(f"/run/netns/{namespace}") as f:
        if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def cpu_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Link:
    """The relay and the devices at its ends."""

    def __init__(self, o):
        self.relay = subprocess.Popen([o.relay, o.edge_ns, o.cloud_ns], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.relay.stdout.readline() != "ready\n":
            raise RuntimeError("the relay did not start")
        for namespace, address, peer in ((o.edge_ns, EDGE_ADDRESS, CLOUD_ADDRESS), (o.cloud_ns, CLOUD_ADDRESS, EDGE_ADDRESS)):
            for what in (["link", "set", "lo", "up"], ["addr", "add", address, "peer", peer, "dev", "link0"], ["link", "set", "link0", "up"]):
                subprocess.run(["ip", "-n", namespace, *what], check=True)
        self.namespaces, self.lock = (o.edge_ns, o.cloud_ns), threading.Lock()

    def ask(self, line):
        with self.lock:
            self.relay.stdin.write(line + "\n")
            self.relay.stdin.flush()
            return self.relay.stdout.readline()

    def rate(self, mbit, delay_ms):
        self.ask(f"shape {mbit} {delay_ms} {max(32768, mbit * 1e6 / 8 * 0.05)}")

    def shape(self, mbit, delay_ms, packets=None):
        """The delay is one way, of each direction; the queue holds 50 ms, at least 32 KiB. From 100 Mbit/s on
        packets of 9000 bytes, about what a network card hands over at a time: as many small ones would cost the relay, and so the measured cores, 15 %."""
        for namespace in self.namespaces:
            subprocess.run(["ip", "-n", namespace, "link", "set", "link0", "mtu", str(packets or (1500 if mbit < 100 else 9000))], check=True)
        self.rate(mbit, delay_ms)

    def stall(self, for_s):
        """Nothing is forwarded meanwhile."""
        self.relay.send_signal(signal.SIGSTOP)
        time.sleep(for_s)
        self.relay.send_signal(signal.SIGCONT)

    def stats(self):
        return [int(n) for n in self.ask("stats").split()]

    def uplink_payload(self):
        """Bytes delivered upward, less the heads of IP and TCP (52 with timestamps)."""
        bytes_, packets, *_ = self.stats()
        return bytes_ - 52 * packets


def end_with_parent():
    """In a child: what is measured does not outlive the one who measures."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Program:
    def __init__(self, o, name, core, command, port, address="127.0.0.1", namespace=None):
        self.log = open(o.dir / f"{name}.log", "wb")
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self.name, self.port = name, port
        self.process = subprocess.Popen([*inside, "taskset", "-c", core, *map(str, command), "--threads", "1"], stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=self.log, preexec_fn=end_with_parent)
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((address, port), 2).close()
                return
            except OSError as e:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{name} did not start: {(o.dir / f'{name}.log').read_text()[-500:]}") from e
                time.sleep(0.05)

    def cpu_s(self):
        return cpu_s(self.process.pid)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Bench:
    """All programs; modes: name -> the Program that is asked."""

    def __init__(self, o, names, edge_extra=(), cloud_extra=()):
        self.o, self.programs, self.modes, self.cloud_extra = o, [], {}, cloud_extra
        self.names, self.edge_extra, self.at = names, [*edge_extra], None
        if os.environ.get("TANDEM_PACED_LAYER_US"):
            links_model.main(o.model, o.dir / "thin.gguf")
            o.model = o.dir / "thin.gguf"
            self.edge_extra.append("--codec-unchecked")  # nobody has measured its quality, nor needs to
        self.random = random.Random(o.seed)
        self.overhead = 40
        self.link = Link(o)
        enter(o.edge_ns)
        subprocess.run([o.root / "deploy/certs.sh", o.dir / "certs", "--name", CLOUD_ADDRESS], check=True, capture_output=True)
        new = subprocess.run([o.bin / "tandem-cloud", "token", "new", "--tenant", "bench", "--principal", "links", "--tokens-file", o.dir / "tokens"],
                             check=True, capture_output=True, text=True)
        self.token = new.stdout.split()[-1]
        (o.dir / "token").touch(0o600)
        (o.dir / "token").write_text(self.token + "\n")
        self.link.shape(1000, 0)
        if o.keep_window:
            for namespace in (o.edge_ns, o.cloud_ns):
                subprocess.run(["ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0"], check=True)
        self.cloud_arguments = ("cloud", CLOUD_CORE, CLOUD_PORT, CLOUD_ADMIN, o.cloud_ns,
                                ["--listen", CLOUD_ADDRESS, "--cert", o.dir / "certs/server.crt", "--key", o.dir / "certs/server.key"], CLOUD_ADDRESS)
        self.cloud = self.start_cloud(*self.cloud_arguments)
        if "edge-only" in names:
            self.modes["edge-only"] = self.start_local()

    def shape(self, mbit, delay_ms, packets=None):
        """Another link: the edges begin anew on it, as what they know of the old one is no part of the question."""
        edges = [p for p in self.programs if p is not self.cloud and p is not self.modes.get("edge-only")]
        for edge in edges:
            edge.stop()
            self.programs.remove(edge)
        self.link.shape(mbit, delay_ms, packets)
        self.at = (mbit, delay_ms)
        for i, name in enumerate(n for n in self.names if n != "edge-only"):
            self.modes[name] = self.start_edge(name, EDGE_PORT + i, self.edge_extra)
        self.modes = {name: self.modes[name] for name in self.names}

    def start_cloud(self, name, core, port, admin, namespace, extra, address):
        command = [self.o.bin / "tandem-cloud", "--model", self.o.model, "--listen-port", port, "--admin-port", admin, "--tokens-file", self.o.dir / "tokens",
                   "--store", self.o.dir / f"{name}-store", "--store-key-file", self.o.dir / f"{name}.key", "--store-ram", "0", "--kv-memory", 1 << 30, *self.cloud_extra, *extra]
        self.programs.append(Program(self.o, name, core, command, port, address, namespace))
        return self.programs[-1]

    def start_local(self):
        return self.start_cloud("edge-only", EDGE_CORE, LOCAL_PORT, LOCAL_ADMIN, None, ["--plain"], "127.0.0.1")

    def start_edge(self, name, port, extra):
        layers = {"planner": [], "cloud-cost": ["--prefer", "cloud-cost"], "cloud-only": ["--edge-layers", 0], "restoring": ["--kv-whole"],
                  "computing": ["--kv-disk", 0]}.get(name) if not name.startswith("k") else ["--edge-layers", name[1:]]
        command = [self.o.bin / "tandem-edge", "--model", self.o.model, "--cloud", f"{CLOUD_ADDRESS}:{CLOUD_PORT}", "--ca", self.o.dir / "certs/ca.crt",
                   "--token-file", self.o.dir / "token", "--listen-port", port, "--data", self.o.dir / name, *layers, *extra]
        self.programs.append(Program(self.o, name, EDGE_CORE, command, port))
        return self.programs[-1]

    def stop(self):
        for program in reversed(self.programs):
            program.stop()
        self.link.relay.stdin.close()
        self.link.relay.wait()

    def revive(self):
        """After a fault: what has ended is started again; the edges with the next shape."""
        self.at = None
        for name in ("cloud", "edge-only"):
            old = self.cloud if name == "cloud" else self.modes["edge-only"]
            if old.process.poll() is None:
                continue
            self.programs.remove(old)
            if name == "cloud":
                self.cloud = self.start_cloud(*self.cloud_arguments)
            else:
                self.modes["edge-only"] = self.start_local()

    def resident_mib(self):
        """Of all programs that are measured."""
        return sum(int(pathlib.Path(f"/proc/{p.process.pid}/statm").read_text().split()[1]) for p in self.programs if p.process.poll() is None) * 4096 >> 20

    def settle(self):
        """Until nobody works any more; 3 s at most."""
        until, before = time.monotonic() + 3, None
        while time.monotonic() < until:
            now = [p.cpu_s() for p in self.programs]
            if before and sum(now) - sum(before) < 0.011:
                return
            before = now
            time.sleep(0.1)

    def text(self, prompt):
        return " ".join(self.random.choices(WORDS, k=max(prompt - self.overhead, 1)))

    def open(self, mode, prompt, tokens=TOKENS, text=None, **extra):
        """A streamed request under way: its connection."""
        body = {"messages": [{"role": "user", "content": text or self.text(prompt)}], "stream": True, "max_tokens": tokens,
                "temperature": 0, "ignore_eos": True, "timings": True, "stream_options": {"include_usage": True}, **extra}
        connection = http.client.HTTPConnection("127.0.0.1", self.modes[mode].port, timeout=STOP_FIRST_S)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"})
        return connection

    def ask(self, mode, prompt, limit_s=STOP_FIRST_S, drop=None, stall=None, **extra):
        """One run. Times in ms from the request on; cut: it took longer than limit_s and counts as that. drop: (seconds, Mbit/s); stall: (seconds, for so
        many seconds); extra: as in open."""
        cpu, relay, link, started = self.cloud.cpu_s(), cpu_s(self.link.relay.pid), self.link.stats(), time.monotonic()
        times, result = [], {"cut": False, "timings": {}}
        connection = self.open(mode, prompt, **extra)
        if drop:
            threading.Timer(drop[0], self.link.rate, (drop[1], self.at[1])).start()
        if stall:
            threading.Timer(stall[0], self.link.stall, (stall[1],)).start()
        try:
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{mode}: {response.status}: {response.read().decode()[:300]}")
            result["conversation"] = response.headers.get("x-conversation-id")
            while True:
                connection.sock.settimeout(max(started + limit_s - time.monotonic(), 0.001))
                line = response.readline()
                if not line or line.startswith(b"data: [DONE]"):
                    break
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if any((c.get("delta") or {}).get("content") for c in event.get("choices") or []):
                    times.append((time.monotonic() - started) * 1e3)
                result["timings"] = event.get("timings") or result["timings"]
                if event.get("usage") and not extra:
                    self.overhead += event["usage"]["prompt_tokens"] - prompt
                if "error" in event:
                    raise RuntimeError(f"{mode}: {event['error']}")
        except TimeoutError:
            result["cut"] = True
        connection.close()
        result.update(ttft=times[0] if times else limit_s * 1e3, t16=limit_s * 1e3 if result["cut"] else times[-1],
                      gap=max([b - a for a, b in zip(times, times[1:])], default=0.0))
        self.settle()
        after = self.link.stats()
        result.update(cpu_s=self.cloud.cpu_s() - cpu, sent=after[0] - link[0], dropped=after[2] - link[2],
                      relay_s=round(cpu_s(self.link.relay.pid) - relay, 2))
        if self.o.verbose:
            print("  {} {ttft:.0f} {t16:.0f} ms, {dropped} packets dropped, relay {relay_s} s, cloud {cpu_s:.2f} s ".format(mode, **result)
                  + json.dumps(result["timings"]), file=sys.stderr, flush=True)
        return result


def ratio_low95(pairs):
    logs = [math.log(a / b) for a, b in pairs]
    if len(logs) < 2:
        return math.exp(logs[0])
    t = T_95[len(logs) - 1] if len(logs) <= len(T_95) else 1.645
    return math.exp(statistics.mean(logs) - t * statistics.stdev(logs) / math.sqrt(len(logs)))


def pair(shape, runs, what):
    """A line of `pairs`."""
    of = {mode: [r[what] for r in rs] for mode, rs in runs.items()}
    middle = {mode: statistics.median(v) for mode, v in of.items()}
    better = min(SINGLES, key=middle.get)
    mbit, delay, prompt = shape
    return {"link_mbit": mbit, "delay_ms": delay, "prompt": prompt, "planner_ms": round(middle["planner"], 1),
            "cloud_only_ms": round(middle["cloud-only"], 1), "edge_only_ms": round(middle["edge-only"], 1),
            "ratio": round(middle["planner"] / middle[better], 4), "ratio_low95": round(ratio_low95(list(zip(of["planner"], of[better]))), 4)}


def one_round(bench, i, prompt, limit_s, runs):
    """Each mode of `runs` once, in the order of round i. --together: the two single sides at the same time, each on its core."""
    turns = [(m,) for m in runs]
    if bench.o.together:
        turns = [SINGLES if t == SINGLES[:1] else t for t in turns if t != SINGLES[1:]]
    for turn in turns[i % len(turns):] + turns[:i % len(turns)]:
        with concurrent.futures.ThreadPoolExecutor(len(turn)) as pool:
            for mode, run in zip(turn, pool.map(lambda mode: bench.ask(mode, prompt, limit_s), turn)):
                runs[mode].append(run)


def measure(bench, shape, repeats, fixed):
    """{mode: [run, ...]} of one link and prompt."""
    o, (mbit, delay, prompt) = bench.o, shape
    if (mbit, delay) != bench.at:
        bench.shape(mbit, delay)
    order = [m for m in bench.modes if fixed or not m.startswith("k")]
    warm = {m: [bench.ask(m, prompt) for _ in range(WARM if m == "planner" else 1)][-1] for m in ("cloud-only", "edge-only", "planner")}
    limit_s = max(STOP * min(warm["cloud-only"]["t16"], warm["edge-only"]["t16"]) / 1e3, 0.5)
    for mode in order:
        for _ in range(0 if mode in warm else WARM if mode == "cloud-cost" else 1):
            bench.ask(mode, prompt, limit_s)
    runs = {m: [] for m in order}
    for i in range(repeats):
        one_round(bench, i, prompt, limit_s, runs)
    return runs


def shapes_of(o):
    """[(shape, repeats, fixed splits too?)]"""
    if o.smoke:
        return [((100, 20, 128), 2, True)]
    if o.rates or o.delays or o.prompts:
        return [((r, d, p), o.repeats, True) for r in o.rates or RATES for d in o.delays or [20] for p in o.prompts or [512]]
    if o.quick:
        return [((r, d, p), o.repeats if d == 20 or p < 2048 else 1, (d, p) == (20, 512)) for d in (20, 2, 100) for r in RATES for p in (128, 512, 2048)]
    return [((r, d, p), o.repeats, True) for r in RATES for d in (2, 20, 100) for p in (128, 512, 1024, 2048, 4096)]


def compare(o):
    names = ["planner", "cloud-only", "edge-only"]
    if o.fixed is None:
        o.fixed = [8] if o.smoke else [8, 15, 25] if o.quick else FIXED
    names += ["cloud-cost"] * o.cost + [f"k{k}" for k in o.fixed if k > 0]  # k = 0 is cloud-only
    bench, results, started = Bench(o, names), [], time.monotonic()
    try:
        for shape, repeats, fixed in shapes_of(o):
            if o.quick and time.monotonic() - started > QUICK_LIMIT_S:
                print("{} Mbit/s, {} ms, {} tokens: no time left".format(*shape), file=sys.stderr)
                continue
            runs = measure(bench, shape, repeats, fixed)
            results.append((shape, runs))
            if not o.json:
                print(links_report.lines(shape, runs, pair(shape, runs, "ttft"), pair(shape, runs, "t16")), flush=True)
    finally:
        bench.stop()
    pairs, pairs_t16 = ([pair(s, runs, what) for s, runs in results] for what in ("ttft", "t16"))
    paced = float(os.environ.get("TANDEM_PACED_LAYER_US") or 0)
    if o.json:
        print(json.dumps({"paced_layer_us": paced, "pairs": pairs, "pairs_t16": pairs_t16,
                          "runs": [dict(zip(("link_mbit", "delay_ms", "prompt"), s), modes=runs) for s, runs in results]}))
    else:
        print(links_report.summary(pairs, pairs_t16, paced))
    if o.svg:
        pathlib.Path(o.svg).write_text(links_report.chart(results))
        print(f"chart: {o.svg}", file=sys.stderr)


# ---- every link, with computing as it is, in half an hour ----

def whole_plan():
    """[(shape, repeats, fixed splits too?)], link after link; 20 ms, what matters most, first."""
    repeats = {128: 4, 512: 3, 2048: 2, 4096: 1}
    return [((r, d, p), repeats[p], r >= 20 and (d, p) == (20, 2048)) for d in (20, 2, 100) for r in RATES for p in repeats]


def whole_cell(bench, shape, repeats, fixed, limits, until):
    """{mode: [run, ...]}. Where the planner looks late, some pairs more, as scatter makes every twentieth late."""
    mbit, delay, prompt = shape
    if (mbit, delay) != bench.at:
        bench.shape(mbit, delay)
        for mode in ("edge-only", "cloud-only", *["planner"] * WARM):
            bench.ask(mode, 512)
    if prompt not in limits:
        limits[prompt] = max(STOP * bench.ask("edge-only", prompt)["t16"] / 1e3, 0.5)
    order = [m for m in bench.modes if fixed or not m.startswith("k")]
    for mode in [m for m in order if m.startswith("k")]:
        bench.ask(mode, 512, limits[prompt])
    if prompt == 2048:  # what a token costs at such positions is known then
        bench.ask("planner", prompt, limits[prompt])
    runs, i = {m: [] for m in order}, 0
    while i < repeats or (i < repeats + (4 if prompt <= 512 else 1) and time.monotonic() < until
                          and max(pair(shape, runs, w)["ratio"] for w in ("ttft", "t16")) > 1.03):
        one_round(bench, i, prompt, limits[prompt], runs)
        i += 1
    return runs


def results_of(results, failed, started):
    """What --json prints and --save keeps."""
    out = {"paced_layer_us": float(os.environ.get("TANDEM_PACED_LAYER_US") or 0), "seconds": round(time.monotonic() - started), "failed": failed}
    for name, what in (("pairs", "ttft"), ("pairs_t16", "t16")):
        out[name] = [pair(s, runs, what) for s, runs in results]
        out[name + "_mean"] = round(math.exp(statistics.mean(math.log(p["ratio"]) for p in out[name])), 4) if results else None
    out["runs"] = [dict(zip(("link_mbit", "delay_ms", "prompt"), s), modes=runs) for s, runs in results]
    return out


def whole(o):
    """Each cell's results are kept as they come (--save); one that fails is named and does not end the run."""
    fixed = [8, 15] if o.fixed is None else o.fixed
    bench = Bench(o, ["planner", "cloud-only", "edge-only"] + [f"k{k}" for k in fixed if k > 0], ["--kv-disk", "256M"], ["--store-size", "1G"])
    plan = [c for c in whole_plan() if all(not only or v in only for v, only in zip(c[0], (o.rates, o.delays, o.prompts)))]
    results, failed, limits, started = [], [], {}, time.monotonic()
    until = started + o.minutes * 60
    try:
        for i, (shape, repeats, splits) in enumerate(plan):
            name = "{} Mbit/s, {} ms, {} tokens".format(*shape)
            if time.monotonic() > until:
                failed.append(f"{name}: no time left")
                continue
            try:
                runs = whole_cell(bench, shape, repeats, splits, limits, until)
                results.append((shape, runs))
                if not o.json:
                    print(links_report.lines(shape, runs, pair(shape, runs, "ttft"), pair(shape, runs, "t16")), flush=True)
            except Exception as e:  # whatever it is: the other cells are worth having
                failed.append(f"{name}: {type(e).__name__}: {e}")
                bench.revive()
            if o.save:
                part = pathlib.Path(f"{o.save}.part")
                part.write_text(json.dumps(results_of(results, failed, started)))
                part.replace(o.save)
            ratios = " ".join(f"{pair(shape, results[-1][1], w)['ratio']:.3f}" for w in ("ttft", "t16")) if results and results[-1][0] == shape else "failed"
            print(f"{time.monotonic() - started:5.0f} s  {i + 1}/{len(plan)}  {name}: {ratios}   {bench.resident_mib()} MiB", file=sys.stderr, flush=True)
    finally:
        bench.stop()
    out = results_of(results, failed, started)
    if o.json:
        print(json.dumps(out))
    elif results:
        print(links_report.summary(out["pairs"], out["pairs_t16"], out["paced_layer_us"]))
    for line in failed:
        print(line, file=sys.stderr)
    if o.svg and results:
        pathlib.Path(o.svg).write_text(links_report.chart(results))


# ---- a link that breaks down under a prompt ----

def hindsight(prompt, at_s, mbit, delay_s, layer_s, singles):
    """Seconds to the first token, at best, for who knew: chunks of 64 tokens, with their KV, leave the device in time, through k layers; the cloud runs what
    it can of them, from the first on, then goes on alone. singles: what each side alone takes; what the cloud takes beyond computing and a round trip
    everybody has to take."""
    extra_s, best = max(singles["cloud-only"] - prompt * LAYERS * layer_s - 2 * delay_s, 0), min(singles.values())
    for k in range(1, LAYERS):
        computed_s, left_s, leave = extra_s, 0.0, 0
        while leave < prompt:
            computed_s += 64 * k * layer_s
            left_s = max(left_s, computed_s) + 64 * (ROW_SIZE + k * KV_SIZE) * 8 / (mbit * 1e6)
            if left_s > at_s:
                break
            leave = min(leave + 64, prompt)
        ran = min(max(at_s - extra_s - 64 * k * layer_s, 0) / ((LAYERS - k) * layer_s), leave)
        left = (leave - ran) * (LAYERS - k) + (prompt - leave) * LAYERS
        best = min(best, at_s + 2 * delay_s + left * layer_s)
    return best


def drop(o):
    """The rate falls to --drop when the planner has done a quarter, a half, three quarters of what it usually takes."""
    layer_s = float(os.environ.get("TANDEM_PACED_LAYER_US") or 0) * 1e-6
    if not layer_s:
        sys.exit("links.sh: --drop needs paced computing: TANDEM_PACED_LAYER_US=80")
    bench, rows = Bench(o, ["planner", "cloud-only", "edge-only"]), []
    try:
        for shape in [(r, d, p) for r in o.rates or [100] for d in o.delays or [20] for p in o.prompts or [512, 2048]]:
            mbit, delay, prompt = shape
            bench.shape(mbit, delay, 1500)
            alone = {m: [bench.ask(m, prompt) for _ in range(2)][-1] for m in ("cloud-only", "edge-only")}
            single = {w: min(r[w] for r in alone.values()) for w in ("ttft", "t16")}
            for part in (0.25, 0.5, 0.75):
                runs = []
                for _ in range(o.repeats):
                    bench.shape(mbit, delay, 1500)
                    usual = [bench.ask("planner", prompt) for _ in range(WARM + 1)][-1]["ttft"]
                    at_s = part * usual / 1e3
                    runs.append(bench.ask("planner", prompt, drop=(at_s, o.drop)))
                best = hindsight(prompt, at_s, mbit, delay / 1e3, layer_s, {m: r["ttft"] / 1e3 for m, r in alone.items()}) * 1e3
                row = {"link_mbit": mbit, "to_mbit": o.drop, "delay_ms": delay, "prompt": prompt, "at_ms": round(at_s * 1e3)}
                for what, known in (("ttft", best), ("t16", best + single["t16"] - single["ttft"])):
                    ms = statistics.median(r[what] for r in runs)
                    row.update({f"{what}_ms": round(ms, 1), f"{what}_known_ms": round(known, 1), f"{what}_ratio": round(ms / known, 3)})
                rows.append({**row, "gap_ms": round(statistics.median(r["gap"] for r in runs), 1)})
                if not o.json:
                    print("{link_mbit} to {to_mbit} Mbit/s after {at_ms} ms, {delay_ms} ms, {prompt} tokens: TTFT {ttft_ms} ({ttft_ratio} of {ttft_known_ms}), "
                          "T16 {t16_ms} ({t16_ratio} of {t16_known_ms}), gap {gap_ms} ms".format(**rows[-1]), flush=True)
    finally:
        bench.stop()
    if o.json:
        print(json.dumps({"drop": rows}))


def stumble(o):
    """The link stands still for --stumble ms when the planner has done a quarter, a half, three quarters of what it usually takes."""
    bench, rows = Bench(o, ["planner", "cloud-only", "edge-only"]), []
    try:
        for mbit, delay, prompt in [(r, d, p) for r in o.rates or [300] for d in o.delays or [20] for p in o.prompts or [2048]]:
            bench.shape(mbit, delay)
            alone = min(bench.ask(m, prompt)["ttft"] for m in ("cloud-only", "edge-only"))
            for _ in range(WARM):
                usual = bench.ask("planner", prompt)
            for part in (0.25, 0.5, 0.75):
                runs = [(bench.ask("planner", prompt), bench.ask("planner", prompt, stall=(part * usual["ttft"] / 1e3, o.stumble / 1e3))) for _ in range(o.repeats)]
                row = {"link_mbit": mbit, "delay_ms": delay, "prompt": prompt, "stall_ms": o.stumble, "at_ms": round(part * usual["ttft"]), "alone_ms": round(alone)}
                for i, name in enumerate(("sound", "stumbled")):
                    row[name] = [round(r[i]["ttft"]) for r in runs]
                plans = [r[1]["timings"]["plan"] for r in runs]
                rows.append({**row, "plans": [p["plans"] for p in plans], "left_tokens": [p["left_to_cloud_tokens"] for p in plans]})
                if not o.json:
                    print("{link_mbit} Mbit/s, {delay_ms} ms, {prompt} tokens, still for {stall_ms} ms after {at_ms}: TTFT {stumbled} against {sound}; better side {alone_ms}; "
                          "plans {plans}, tokens left to the cloud {left_tokens}".format(**rows[-1]), flush=True)
    finally:
        bench.stop()
    if o.json:
        print(json.dumps({"stumble": rows}))


# ---- the link kept full ----

HELD = ["--codec", "raw", "--hidden", "f32", "--kv-memory", "512M"]  # devices that hold a prompt's KV and send it as it is: no computing holds it up


def hold(bench, prompt):
    """A text whose KV the device holds in all layers."""
    bench.shape(1000, 1)
    text = bench.text(prompt)
    bench.open("k30", prompt, 1, text).getresponse().read()
    bench.settle()
    return text


def flood(bench, mbit, text, prompt):
    """Its KV on the way, and how full the link then is, of the shaped rate, over 0.1 s."""
    before = bench.link.uplink_payload()
    connection = bench.open("k30", prompt, 2, text, cache=False)
    until = time.monotonic() + 20
    while bench.link.uplink_payload() - before < min(mbit * 1e6 / 8 * 0.3, 4e6) and time.monotonic() < until:
        time.sleep(0.01)
    before, started = bench.link.uplink_payload(), time.monotonic()
    time.sleep(0.1)
    return connection, (bench.link.uplink_payload() - before) * 8e-6 / (time.monotonic() - started) / mbit


def upload(bench, mbit, text, prompt):
    """[(s, bytes of payload)] while a prompt goes up whose KV the device holds in all layers: no computing holds it up. 8 s at most."""
    connection = bench.open("k30", prompt, 2, text, cache=False)  # the second token needs all KV
    started, seen = time.monotonic(), [(0.0, bench.link.uplink_payload())]
    at = 0.0
    while at < 8:
        time.sleep(0.004)
        at, now = time.monotonic() - started, bench.link.uplink_payload()
        if now - seen[-1][1] > 1000:
            seen.append((at, now))
        elif at - seen[-1][0] > 0.5 and now - seen[0][1] > 1e6:
            break
    connection.close()
    if bench.o.verbose:
        print("  " + " ".join(f"{at:.3f}:{(size - seen[0][1]) / 1e6:.2f}" for at, size in seen[::max(len(seen) // 60, 1)]), file=sys.stderr)
    return seen


def goodput(o):
    """Payload of TCP that arrives from when the link is full until the last byte has come, over the shaped rate."""
    bench, rows = Bench(o, ["k30"], HELD), []
    prompt = (o.prompts or [4096])[0]
    try:
        for mbit in o.rates or [1, 5, 20, 100, 300]:
            text = hold(bench, prompt)
            shares, whole = [], []
            bench.link.shape(mbit, (o.delays or [20])[0])
            upload(bench, mbit, text, prompt)  # the connection finds the new rate
            bench.settle()
            for _ in range(o.repeats):
                seen = upload(bench, mbit, text, prompt)
                full = next(i for i, (_, size) in enumerate(seen) if size - seen[0][1] > min(mbit * 1e6 / 8 * 0.3, 4e6))
                for i, out in ((full, shares), (1, whole)):
                    out.append((seen[-1][1] - seen[i][1]) * 8e-6 / (seen[-1][0] - seen[i][0]) / mbit)
                bench.settle()
            rows.append({"link_mbit": mbit, "share": round(statistics.median(shares), 4), "least": round(min(shares), 4), "from_start": round(statistics.median(whole), 4)})
            if not o.json:
                print("{link_mbit:5} Mbit/s: {share:.1%} of it is payload, at least {least:.1%}; from the first byte on {from_start:.1%}".format(**rows[-1]), flush=True)
    finally:
        bench.stop()
    if o.json:
        print(json.dumps({"goodput": rows}))


# ---- what the cloud has lost ----

def whole_on_disk(bench, mode):
    """The device has run its conversation through all layers and written it, or does not get on with it."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 3:
        connection = http.client.HTTPConnection("127.0.0.1", bench.modes[mode].port, timeout=5)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        now = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("tandem_edge_kv_disk_written_total"))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.2)


def lose_everything(bench):
    """The cloud without its store; its address is the same."""
    bench.cloud.process.kill()
    bench.cloud.process.wait()
    bench.programs.remove(bench.cloud)
    shutil.rmtree(bench.o.dir / "cloud-store")
    bench.cloud = bench.start_cloud(*bench.cloud_arguments)
    time.sleep(6)  # the slowest pause between two attempts to connect is 5 s


def restore(o):
    """The second turn of a conversation that the cloud has lost, with the device's copy and without one; pairs. Before it each device asks something else, so
    that both sides know what they can do."""
    bench, rows = Bench(o, ["restoring", "computing"], ["--local", "off", "--kv-memory", "512M"]), []
    try:
        for mbit, delay in [(r, d) for r in o.rates or [1000] for d in o.delays or [1]]:
            runs = {m: [] for m in bench.names}
            for i in range(o.repeats):
                bench.shape(mbit, delay)
                order = bench.names[i % 2:] + bench.names[:i % 2]
                first = {m: bench.ask(m, (o.prompts or [2240])[0]) for m in order}
                whole_on_disk(bench, "restoring")
                lose_everything(bench)
                for mode in order:
                    bench.ask(mode, 970)
                    runs[mode].append(bench.ask(mode, 65, conversation=first[mode]["conversation"]))
            row = {"link_mbit": mbit, "delay_ms": delay}
            for mode, rs in runs.items():
                row[mode] = [{"ttft_ms": round(r["ttft"]), "restored": r["timings"]["plan"]["restored_tokens"], "sent_mb": round(r["sent"] / 1e6, 1),
                              "uplink_mbit": round(r["timings"]["plan"].get("estimates", {}).get("uplink_mbit", 0))} for r in rs]
            row["ratio"] = round(math.exp(statistics.mean(math.log(a["ttft_ms"] / b["ttft_ms"]) for a, b in zip(row["restoring"], row["computing"]))), 3)
            rows.append(row)
            if not o.json:
                print("{link_mbit} Mbit/s, {delay_ms} ms: restoring / computing {ratio}".format(**row))
                for mode in bench.names:
                    print(f"   {mode}: " + ", ".join("{ttft_ms} ms ({restored} tokens restored, {sent_mb} MB, {uplink_mbit} Mbit/s believed)".format(**r) for r in row[mode]), flush=True)
    finally:
        bench.stop()
    if o.json:
        print(json.dumps({"restore": rows}))


class Watcher(threading.Thread):
    """In the cloud's namespace: since when no request is running there."""

    def __init__(self, namespace):
        super().__init__(daemon=True)
        self.namespace, self.running, self.idle_at, self.ends = namespace, 0, 0.0, False
        self.start()

    def run(self):
        enter(self.namespace)
        connection = http.client.HTTPConnection("127.0.0.1", CLOUD_ADMIN, timeout=10)
        while not self.ends:
            connection.request("GET", "/metrics")
            asked = time.monotonic()
            text = connection.getresponse().read().decode()
            now = sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(("tandem_requests_running", "tandem_requests_waiting")))
            if self.running and not now:
                self.idle_at = asked
            self.running = now
            time.sleep(0.003)


def cancel(o):
    """From the client's going away to the cloud's having nothing to do, with the uplink full."""
    bench, rows = Bench(o, ["k30"], HELD), []
    delay, prompt = (o.delays or [20])[0], (o.prompts or [4096])[0]
    try:
        watcher = Watcher(o.cloud_ns)
        for mbit in o.rates or RATES:
            text = hold(bench, prompt)
            bench.link.shape(mbit, delay)
            upload(bench, mbit, text, prompt)  # the connection finds the new rate
            bench.settle()
            took, full = [], []
            for _ in range(o.repeats):
                connection, share = flood(bench, mbit, text, prompt)
                full.append(share)
                if not watcher.running:
                    raise RuntimeError("the cloud had nothing to do before it was told to stop")
                watcher.idle_at, started = 0.0, time.monotonic()
                connection.close()
                while not watcher.idle_at and time.monotonic() < started + 10:
                    time.sleep(0.002)
                took.append((watcher.idle_at - started) * 1e3 if watcher.idle_at else 1e4)
                bench.settle()
            rows.append({"link_mbit": mbit, "delay_ms": delay, "cancel_ms": round(statistics.median(took), 1), "worst_ms": round(max(took), 1),
                         "over_rtt_ms": round(max(took) - 2 * delay, 1), "share": round(min(full), 3)})
            if not o.json:
                print("{link_mbit:5} Mbit/s, {share:.0%} full at least: {cancel_ms:7.1f} ms, at worst {worst_ms:.1f}: {over_rtt_ms:.1f} over the round trip".format(**rows[-1]),
                      flush=True)
        watcher.ends = True
        watcher.join()
    finally:
        bench.stop()
    if o.json:
        print(json.dumps({"cancel": rows}))


def stand_out():
    """A session of its own that the scheduler prefers (sched_autogroup): other work on the machine may not take the measured cores. Where it is not to be had, so be it."""
    try:
        os.setsid()
        pathlib.Path("/proc/self/autogroup").write_text("-15")
    except OSError:
        pass


def numbers(text):
    return [float(n) if "." in n else int(n) for n in text.split(",")]


def main():
    p = argparse.ArgumentParser(prog="links.sh", description="Tandem over shaped links; see the head of tests/bench/links.sh.")
    kind = p.add_mutually_exclusive_group()
    kind.add_argument("--drop", type=float, metavar="MBIT", help="the rate falls to this in the middle of a prompt")
    kind.add_argument("--stumble", type=float, metavar="MS", help="the link stands still for so long in the middle of a prompt")
    for name, text in (("quick", "fewer shapes, repeats and splits; paced; under half an hour"), ("smoke", "one shape, two repeats; under 90 s"),
                       ("whole", "every rate and delay with 128 to 4,096 tokens, computing as it is; --minutes"),
                       ("goodput", "how much of a full uplink is payload"), ("cancel", "how soon CANCEL works on a full uplink"),
                       ("restore", "a conversation that the cloud has lost, sent from the device")):
        kind.add_argument("--" + name, action="store_true", help=text)
    p.add_argument("--rates", type=numbers, metavar="MBIT,...")
    p.add_argument("--delays", type=numbers, metavar="MS,...", help="one way")
    p.add_argument("--prompts", type=numbers, metavar="TOKENS,...")
    p.add_argument("--fixed", type=lambda t: numbers(t) if t else [], metavar="K,...", help="fixed splits to measure too; '' for none")
    p.add_argument("--minutes", type=float, default=27, help="--whole: no cell begins later")
    p.add_argument("--save", metavar="FILE", help="--whole: what --json prints, after each cell")
    p.add_argument("--cost", action="store_true", help="--prefer cloud-cost too")
    p.add_argument("--repeats", type=int, default=0, metavar="N")
    p.add_argument("--json", action="store_true")
    p.add_argument("--svg", metavar="FILE", help="draw a chart there")
    p.add_argument("--together", action="store_true", help="the single sides at the same time: what two cores of one machine cost each other is then in all modes")
    p.add_argument("--keep-window", action="store_true", help="TCP keeps its window when idle (net.ipv4.tcp_slow_start_after_idle=0)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--verbose", action="store_true", help="every run, with its timings")
    for name in ("root", "bin", "dir", "model", "relay"):
        p.add_argument("--x-" + name, dest=name, type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    for name in ("edge-ns", "cloud-ns"):
        p.add_argument("--x-" + name, dest=name.replace("-", "_"), required=True, help=argparse.SUPPRESS)
    o = p.parse_args()
    o.repeats = o.repeats or (2 if o.quick or o.drop or o.stumble or o.goodput else 3 if o.cancel or o.restore else 10)
    if o.quick:
        os.environ.setdefault("TANDEM_PACED_LAYER_US", QUICK_PACE_US)
        o.svg = o.svg or "links.svg"
    stand_out()
    (whole if o.whole else goodput if o.goodput else restore if o.restore else cancel if o.cancel else drop if o.drop else stumble if o.stumble else compare)(o)


if __name__ == "__main__":
    main()
