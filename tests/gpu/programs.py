"""programs: the real programs on a machine with a GPU: tandem-edge on its CPU, tandem-cloud on its GPU.

    32 and 64 streams at once, each against its reply alone; kill -9 of the cloud in the middle of a reply; what `exact` is answered; that the GPU drew
    the tokens and took the pieces itself; what /metrics says of it; prompts that it has no room for, out to pinned host memory and back, or from the disk.
    Once in the fast mode, where replies are counted, and once with --deterministic, where every one has to be the same.
    Faults: more memory wanted than there is; others that take what is left; a device that is lost in the middle of replies (gpu_faults.c).

usage: TANDEM_BIN=build/release/bin TANDEM_MODEL=model.gguf programs.py [fast] [deterministic] [faults]
needs: nothing but Python, and cc for the faults. Prints one line a check and exits with the number of those that failed.
"""
import concurrent.futures
import http.client
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cloud, Edge  # noqa: E402

STREAMS, TOKENS, KILLS = 64, 256, 4
LONG = 2000  # tokens of a reply that is still being made when something happens
PAGES, PROMPTS = 40, 16  # of the run that is short of pages: its prompts have 5 or 6 blocks each
failures = []


def check(name, good, text=""):
    print(f"{'ok' if good else 'FAILED'}  {name}  {text}", flush=True)
    if not good:
        failures.append(name)


def ask(port, prompt, **more):
    """(text, usage, when its parts came); an error of the API is raised as it came."""
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": TOKENS, "ignore_eos": True, **more}
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    if r.status != 200:
        raise RuntimeError(f"{r.status} {r.read().decode()[:300]}")
    parts, usage, times = [], None, []
    for line in r:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        data = json.loads(line[6:])
        if "error" in data:
            raise RuntimeError(json.dumps(data["error"]))
        for choice in data.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                times.append(time.monotonic())
                parts.append(text)
        usage = data.get("usage") or usage
    c.close()
    return "".join(parts), usage, times


def prompt_of(i):
    return f"Tell me about the number {i} and about {'rivers' if i % 2 else 'hills'}." + " Go on, with much detail." * i


def ask_one(port_and_number):
    port, i, *tokens = port_and_number
    return ask(port, prompt_of(i), cache=False, max_tokens=tokens[0] if tokens else TOKENS)


def streams(edge, strict, count, alone):
    with concurrent.futures.ProcessPoolExecutor(count) as pool:  # one process reads some 5,000 tokens/s
        list(pool.map(time.sleep, [0.2] * count))
        begun = time.monotonic()
        replies = list(pool.map(ask_one, [(edge.port, i) for i in range(count)]))
        took = time.monotonic() - begun
    same = sum(r[0] == a for r, a in zip(replies, alone))
    whole = sum(r[1]["completion_tokens"] == TOKENS for r in replies)
    first = sorted(r[2][0] - begun for r in replies)
    begin, end = max(r[2][0] for r in replies), min(r[2][-1] for r in replies)  # all decode
    decoding = sum(begin < t <= end for r in replies for t in r[2]) / max(end - begin, 1e-3)
    check(f"{count} streams at once", whole == count and (same == count or not strict),
          f"{whole} whole, {same} as alone; {count * TOKENS / took:.0f} tokens/s, {decoding:.0f} while all decode, "
          f"first token after {first[len(first) // 2]:.2f} s (median)")


def by_the_gpu(cloud):
    m = cloud.metrics()
    made, drawn, pieces = (m.get(f"tandem_{n}_total", 0) for n in ("generated_tokens", "drawn_by_device", "kv_pieces_on_device"))
    check("the GPU drew every token and took the pieces", made == drawn > 0 and pieces > 0, f"{drawn:g} of {made:g} tokens, {pieces:g} pieces")


def metrics_of_the_gpu(cloud):
    m = {name.removeprefix("tandem_gpu_"): value for name, value in cloud.metrics().items() if name.startswith("tandem_gpu_")}
    for name, value in sorted(m.items()):
        print(f"    {name} {value:g}")
    driver = ["memory_used_bytes", "memory_bytes", "power_watts", "clock_hertz", "memory_clock_hertz", "temperature_celsius"]
    check("/metrics has what NVML says", all(m.get(n, 0) > 0 for n in driver) and 0 <= m.get("utilization", -1) <= 1 and 0 <= m.get("memory_utilization", -1) <= 1)
    parts = {name.split('"')[1]: value for name, value in m.items() if name.startswith("step_part")}
    check("/metrics says where the time of steps goes",
          m.get("steps_total", 0) > m.get("steps_looked_at_total", 0) > 0 and m.get("busy_seconds_total", 0) > 0 and m.get("idle_seconds_total", 0) > 0
          and all(parts.get(n, 0) > 0 for n in ("products", "attention", "other", "sampling", "copies")) and sum(parts.values()) < m["busy_seconds_total"],
          ", ".join(f"{n} {100 * v / sum(parts.values()):.0f} %" for n, v in sorted(parts.items()) if v))


def kills(cloud, edge, strict):
    prompt = "Write a story about a fox and a well. " + "The fox is thirsty and the well is deep. " * 12
    more = dict(max_tokens=400, temperature=0.9, seed=77)
    begun = time.monotonic()
    undisturbed, usage, _ = ask(edge.port, prompt, **more)
    took = time.monotonic() - begun
    rng, same, whole = random.Random(1), 0, 0

    def kill():
        cloud.kill()
        cloud.start()

    for _ in range(KILLS):
        t = threading.Timer(rng.uniform(0.1, 0.9) * took, kill)
        t.start()
        text, usage, _ = ask(edge.port, prompt, **more)
        t.join()
        same += text == undisturbed
        whole += usage["completion_tokens"] == 400
    check(f"{KILLS} kills in the middle of a reply", whole == KILLS and (same == KILLS or not strict),
          f"{whole} whole, {same} as undisturbed; alone {took:.2f} s")


def kill_under_streams(cloud, edge, strict, count, alone):
    """All of them are cut off in the middle, and each goes on where it was."""
    def made():
        return cloud.metrics().get("tandem_generated_tokens_total", 0)

    before = made()
    with concurrent.futures.ProcessPoolExecutor(count) as pool:
        list(pool.map(time.sleep, [0.2] * count))
        replies = pool.map(ask_one, [(edge.port, i) for i in range(count)])
        until = time.monotonic() + 60
        while (killed_at := made() - before) < count * TOKENS / 8 and time.monotonic() < until:
            time.sleep(0.01)
        cloud.kill()
        cloud.start()
        replies = list(replies)
    same = sum(r[0] == a for r, a in zip(replies, alone))
    whole = sum(r[1]["completion_tokens"] == TOKENS for r in replies)
    check(f"a kill under {count} streams", count * TOKENS / 8 <= killed_at < count * TOKENS and whole == count and (same == count or not strict),
          f"{whole} whole, {same} as alone; killed after {killed_at:g} of {count * TOKENS} tokens")


def exact(edge):
    try:
        ask(edge.port, "Hello", fidelity="exact")
        check("exact between different arithmetic is refused", False, "it was answered")
    except RuntimeError as e:
        check("exact between different arithmetic is refused", "visible-lossless" in str(e), str(e)[:200])


def short_of_pages(cloud, edge, strict):
    def story(i):
        return f"Story {i}." + f" The {i}. fox is thirsty and the well is deep." * 24

    first, again = ([ask(edge.port, story(i), max_tokens=16) for i in range(PROMPTS)] for _ in range(2))
    same = sum(a[0] == b[0] for a, b in zip(first, again))
    cached = sum(r[1]["prompt_tokens_details"]["cached_tokens"] for r in again)
    out, back = (cloud.metrics().get(f'tandem_kv_pages_swapped_total{{direction="{d}"}}', 0) for d in ("out", "in"))
    pinned = cloud.metrics().get("tandem_kv_swap_memory_bytes", 0)
    check("a thread has pinned memory for it", pinned >= 250 << 20, f"{pinned / 2**20:.0f} MiB")
    check("what the GPU has no room for comes back", out > PAGES and back > PAGES and cached >= PROMPTS * 256 and (same == PROMPTS or not strict),
          f"{out:g} pages out, {back:g} in; {cached} tokens cached the second time, {same} of {PROMPTS} replies the same")


def everything(cloud, edge, strict):
    alone = [ask(edge.port, prompt_of(i), cache=False)[0] for i in range(STREAMS)]
    for count in (STREAMS // 2, STREAMS):
        streams(edge, strict, count, alone)
    by_the_gpu(cloud)
    metrics_of_the_gpu(cloud)
    kills(cloud, edge, strict)
    kill_under_streams(cloud, edge, strict, STREAMS, alone)
    exact(edge)


def from_the_disk(cloud, edge, strict):
    """Long prompts, few pages, no memory of the store's, no swap. After a restart the first comes from the disk; the others where that is sooner than computing."""
    def story(i):
        return f"Story {i}." + f" The {i}. fox is thirsty and the well is deep." * 90

    first = [ask(edge.port, story(i), max_tokens=16) for i in range(4)]
    check("stopped", cloud.stop() == 0)
    cloud.start()
    again = [ask(edge.port, story(i), max_tokens=16) for _ in range(2) for i in range(4)]
    same = sum(a[0] == b[0] for a, b in zip(first * 2, again))
    cached, asked = (sum(n(r[1]) for r in again) for n in (lambda u: u["prompt_tokens_details"]["cached_tokens"], lambda u: u["prompt_tokens"]))
    check("long prompts come from the disk", again[0][1]["prompt_tokens_details"]["cached_tokens"] >= 512 and (same == len(again) or not strict),
          f"{cached} of {asked} tokens; {same} of {len(again)} replies the same")


# --- faults ---


def ask_whatever(port_and_number):
    try:
        return ask_one(port_and_number)[1]["completion_tokens"], ""
    except (RuntimeError, OSError, http.client.HTTPException) as e:
        return 0, str(e)


def too_much_memory(d):
    cloud = Cloud(d / "large", extra=["--device", "cuda:0", "--pages", "16777216"])
    cloud.new_token()
    try:
        cloud.start()
        check("more pages than fit", False, "it started")
    except RuntimeError:
        last = cloud.log().strip().splitlines()[-1]
        check("more pages than fit", cloud.process.returncode == 1 and "at most" in last, last[:300])
    cloud.kill()


def others_take_memory(cloud, edge, tell):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask_whatever, [(edge.port, i) for i in range(8)]))  # kernels are loaded when they are first needed
        tell("take")
        replies = list(pool.map(ask_whatever, [(edge.port, i) for i in (*range(8), 9)]))
    tell("give")
    check("others take all memory while it serves", all(n == TOKENS for n, _ in replies) and cloud.process.poll() is None, f"{replies}"[:300])


def lose(cloud, tell):
    """Break the device. Does the cloud end by itself and say why; and in numbers."""
    before, begun = len(cloud.log()), time.monotonic()
    tell("lose")
    try:
        code = cloud.process.wait(30)
    except subprocess.TimeoutExpired:
        code = None
    said = cloud.log()[before:]
    return code == 1 and "the device that computes has failed" in said and "illegal memory access" in said, f"exit code {code} after {time.monotonic() - begun:.1f} s"


def lost_while_idle(cloud, tell):
    check("a device that is lost while nobody asks ends the cloud, too", *lose(cloud, tell))
    cloud.start()


def device_is_lost(cloud, edge, tell):
    """Replies fail with a word, or wait and are whole once the cloud is back; it ends by itself, and says why; what was stored is there."""
    kept = "Keep this in mind. " + "The fox is thirsty and the well is deep. " * 20
    text, _, _ = ask(edge.port, kept, max_tokens=16)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask_whatever, (edge.port, i, LONG)) for i in range(8)]
        time.sleep(0.5)
        check("a lost device ends the cloud, which says why", *lose(cloud, tell))
        cloud.env.pop("TANDEM_GPU_FAULTS")
        cloud.start()
        ended = [r.result() for r in running]
    whole = sum(n == LONG for n, _ in ended)
    check("every reply fails with a word, or waits and is whole", all(n == LONG or "error" in word.lower() for n, word in ended),
          f"{whole} whole; " + "; ".join(sorted({w for _, w in ended if w}))[:400])
    again, usage, _ = ask(edge.port, kept, max_tokens=16)
    check("what was stored is there", again == text and usage["prompt_tokens_details"]["cached_tokens"] >= 64, f"{usage}")


def faults():
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        library, words = d / "gpu_faults.so", d / "faults"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, pathlib.Path(__file__).with_name("gpu_faults.c"), "-ldl", "-lpthread"], check=True)
        words.write_text("")

        def tell(word):
            words.write_text(word)
            until = time.monotonic() + 30
            while words.read_text() and time.monotonic() < until:
                time.sleep(0.02)

        too_much_memory(d)
        cloud = Cloud(d / "c", extra=["--device", "cuda:0", "--deterministic"])
        cloud.env.update(LD_PRELOAD=str(library), TANDEM_GPU_FAULTS=str(words))
        token = cloud.new_token()
        cloud.start()
        edge = Edge(d / "e", cloud, token, 8, extra=["--codec", "l1", "--hidden", "f32"]).start()
        try:
            others_take_memory(cloud, edge, tell)
            lost_while_idle(cloud, tell)
            device_is_lost(cloud, edge, tell)
        except Exception as e:
            check("no surprise", False, f"{e!r}\n{cloud.log()[-3000:]}\n{edge.log()[-1500:]}")
        finally:
            edge.stop()
            cloud.kill()


def run(mode, what, cloud_extra=()):
    strict = mode == "deterministic"
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        cloud = Cloud(d / "c", extra=["--device", "cuda:0", *(["--deterministic"] if strict else []), *cloud_extra])
        token = cloud.new_token()
        begun = time.monotonic()
        cloud.start()
        edge = Edge(d / "e", cloud, token, 8, extra=["--codec", "l1" if strict else "l0", "--hidden", "f32"]).start()
        try:
            check("the cloud computes on the GPU", "backend cuda" in cloud.log(), f"up after {time.monotonic() - begun:.1f} s")
            what(cloud, edge, strict)
            check("the cloud stops cleanly", cloud.stop() == 0)
        except Exception as e:  # what went wrong is in the log
            check("no surprise", False, f"{e!r}\n{cloud.log()[-3000:]}\n{edge.log()[-1500:]}")
        finally:
            edge.stop()
            cloud.kill()


for mode in sys.argv[1:] or ["fast", "deterministic", "faults"]:
    print(f"--- {mode}", flush=True)
    if mode == "faults":
        faults()
        continue
    run(mode, everything)
    run(mode, short_of_pages, ["--pages", str(PAGES), "--swap-memory", "256M", "--store-ram", "0"])
    run(mode, from_the_disk, ["--pages", str(PAGES), "--swap-memory", "0", "--store-ram", "0"])
sys.exit(len(failures))
