"""programs: the real programs on a machine with a GPU: tandem-edge on its CPU, tandem-cloud on its GPU.

    64 streams at once, each against its reply alone; kill -9 of the cloud in the middle of a reply; what `exact` is answered.
    Once in the fast mode, where replies are counted, and once with --deterministic, where every one has to be the same.

usage: TANDEM_BIN=build/release/bin TANDEM_MODEL=model.gguf programs.py [fast] [deterministic]
needs: nothing but Python. Prints one line a check and exits with the number of those that failed.
"""
import concurrent.futures
import http.client
import json
import pathlib
import random
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cloud, Edge  # noqa: E402

STREAMS, TOKENS, KILLS = 64, 48, 4
failures = []


def check(name, good, text=""):
    print(f"{'ok' if good else 'FAILED'}  {name}  {text}", flush=True)
    if not good:
        failures.append(name)


def ask(edge, prompt, **more):
    """(text, usage, seconds to the first token, seconds); an error of the API is raised as it came."""
    body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": TOKENS, "ignore_eos": True, **more}
    c = http.client.HTTPConnection("127.0.0.1", edge.port, timeout=120)
    begun = time.monotonic()
    c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    if r.status != 200:
        raise RuntimeError(f"{r.status} {r.read().decode()[:300]}")
    parts, usage, first = [], None, None
    for line in r:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        data = json.loads(line[6:])
        if "error" in data:
            raise RuntimeError(json.dumps(data["error"]))
        for choice in data.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                first = first or time.monotonic() - begun
                parts.append(text)
        usage = data.get("usage") or usage
    c.close()
    return "".join(parts), usage, first, time.monotonic() - begun


def prompt_of(i):
    return f"Tell me about the number {i} and about {'rivers' if i % 2 else 'hills'}." + " Go on, with much detail." * i


def streams(edge, strict):
    alone = [ask(edge, prompt_of(i), cache=False)[0] for i in range(STREAMS)]
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        replies = list(pool.map(lambda i: ask(edge, prompt_of(i), cache=False), range(STREAMS)))
    took = time.monotonic() - begun
    same = sum(r[0] == a for r, a in zip(replies, alone))
    whole = sum(r[1]["completion_tokens"] == TOKENS for r in replies)
    first = sorted(r[2] for r in replies)
    check(f"{STREAMS} streams at once", whole == STREAMS and (same == STREAMS or not strict),
          f"{whole} whole, {same} as alone; {STREAMS * TOKENS / took:.0f} tokens/s, first token after {first[len(first) // 2]:.2f} s (median)")


def kills(cloud, edge, strict):
    prompt = "Write a story about a fox and a well. " + "The fox is thirsty and the well is deep. " * 12
    more = dict(max_tokens=400, temperature=0.9, seed=77)
    undisturbed, usage, _, took = ask(edge, prompt, **more)
    rng, same, whole = random.Random(1), 0, 0

    def kill():
        cloud.kill()
        cloud.start()

    for _ in range(KILLS):
        t = threading.Timer(rng.uniform(0.1, 0.9) * took, kill)
        t.start()
        text, usage, _, _ = ask(edge, prompt, **more)
        t.join()
        same += text == undisturbed
        whole += usage["completion_tokens"] == 400
    check(f"{KILLS} kills in the middle of a reply", whole == KILLS and (same == KILLS or not strict),
          f"{whole} whole, {same} as undisturbed; alone {took:.2f} s")


def exact(edge):
    try:
        ask(edge, "Hello", fidelity="exact")
        check("exact between different arithmetic is refused", False, "it was answered")
    except RuntimeError as e:
        check("exact between different arithmetic is refused", "visible-lossless" in str(e), str(e)[:200])


def run(mode):
    print(f"--- {mode}", flush=True)
    strict = mode == "deterministic"
    with tempfile.TemporaryDirectory() as d:
        d = pathlib.Path(d)
        cloud = Cloud(d / "c", extra=["--device", "cuda:0"] + (["--deterministic"] if strict else []))
        token = cloud.new_token()
        begun = time.monotonic()
        cloud.start()
        edge = Edge(d / "e", cloud, token, 8, extra=["--codec", "l0", "--hidden", "f32"]).start()
        try:
            check("the cloud computes on the GPU", "backend cuda" in cloud.log(), f"up after {time.monotonic() - begun:.1f} s")
            streams(edge, strict)
            kills(cloud, edge, strict)
            exact(edge)
            for name, value in sorted(cloud.metrics().items()):
                if name.startswith("tandem_gpu"):
                    print(f"    {name} {value:g}")
            check("the cloud stops cleanly", cloud.stop() == 0)
        except Exception as e:  # what went wrong is in the log
            check("no surprise", False, f"{e!r}\n{cloud.log()[-3000:]}\n{edge.log()[-1500:]}")
        finally:
            edge.stop()
            cloud.kill()


for mode in sys.argv[1:] or ["fast", "deterministic"]:
    run(mode)
sys.exit(len(failures))
