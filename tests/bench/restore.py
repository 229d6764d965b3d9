#!/usr/bin/env python3
"""restore.py [--words N] RATE... [-- FLAG...]: does a stored prompt come back sooner than it is computed, whatever the disk? Real tandem-cloud, its reads slowed down to RATE MB/s
(slow_disk.c; 0: as fast as the disk is), asked through its own API. By turns a prompt that nothing is known of, and the stored one; between them the pages
are too few for both, so the stored one always comes from the disk. The first time after the start nothing is known of the disk yet. N words (1,080) are 1.4 tokens each. What stands behind -- goes to tandem-cloud.

TANDEM_BIN and TANDEM_MODEL as for the end-to-end tests; TANDEM_RESTORE_PAIRS (6): so often both. One line a rate: time to the first token, ms, and the median
of restored / computed, each pair by itself, with its quartiles."""
import http.client
import json
import os
import pathlib
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import Cloud  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
TIMES = int(os.environ.get("TANDEM_RESTORE_PAIRS", "6"))


def prompt(number, words):
    """As many tokens whatever the number: another letter in front, and so no block in common."""
    return chr(ord("A") + number) + " " + " ".join(f"{i * 31 % 89} steps to the well" for i in range(words // 5))


def ask(cloud, text, cache):
    """Seconds to the first token, and the usage."""
    body = {"model": "default", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4, "stream": True, "fidelity": "exact",
            "cache": cache, "stream_options": {"include_usage": True}, "ignore_eos": True}
    link = http.client.HTTPSConnection("localhost", cloud.port, context=ssl.create_default_context(cafile=cloud.ca), timeout=300)
    link.connect()
    begin = time.monotonic()
    link.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": "Bearer " + cloud.token, "Content-Type": "application/json"})
    reply, first, text, usage = link.getresponse(), None, "", None
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                first = first or time.monotonic() - begin
                text += choice["delta"]["content"]
    link.close()
    return first, text, usage


def measure(directory, library, rate, words, flags):
    disk = directory / "rate"
    cloud = Cloud(directory / "cloud", extra=["--pages", str(words * 24 // 1080), "--store-ram", "0", "--swap-memory", "0", *flags])
    cloud.env.update(LD_PRELOAD=str(library), TANDEM_SLOW_DISK=str(disk))
    cloud.token = cloud.new_token()
    disk.write_text("0")
    cloud.start()
    _, want, usage = ask(cloud, prompt(1, words), True)
    assert cloud.stop() == 0
    disk.write_text(str(rate * 1000000))
    cloud.start()
    computing, restoring, cached, others = [], [], [], 0
    may_differ = "--device" in flags and "--deterministic" not in flags
    try:
        ask(cloud, prompt(2, words), False)  # what computing takes is known by then
        for i in range(TIMES):
            took, _, fresh = ask(cloud, prompt(3 + i, words), False)
            assert fresh["prompt_tokens"] == usage["prompt_tokens"], "a prompt of another length is no comparison"
            computing.append(took)
            took, text, used = ask(cloud, prompt(1, words), True)
            others += text != want
            assert may_differ or others == 0, "the reply is another one"
            restoring.append(took)
            cached.append(used["prompt_tokens_details"]["cached_tokens"])
    finally:
        cloud.kill()
    return usage["prompt_tokens"], computing, restoring, cached, others


def main():
    rates, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    rates, words = rates.split(), 1080
    if rates[0] == "--words":
        rates, words = rates[2:], int(rates[1])
    work = pathlib.Path(tempfile.mkdtemp(prefix="tandem-restore-", dir=os.environ.get("TMPDIR", "/tmp")))
    library = work / "slow_disk.so"
    try:
        subprocess.run(["cc", "-std=c17", "-O2", "-shared", "-fPIC", "-o", library, HERE / "slow_disk.c", "-ldl"], check=True)
        for rate in rates:
            tokens, computing, restoring, cached, others = measure(work / rate, library, int(rate), words, flags.split())
            ratios = sorted(r / c for r, c in zip(restoring[1:], computing[1:]))
            low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
            base, later = statistics.median(computing), statistics.median(restoring[1:])
            print(f"{rate} MB/s: {tokens} tokens, computing {base * 1e3:.0f} ({min(computing) * 1e3:.0f} to {max(computing) * 1e3:.0f}), first {restoring[0] * 1e3:.0f} "
                  f"({restoring[0] / computing[0]:.3f}), then {later * 1e3:.0f} ({min(restoring[1:]) * 1e3:.0f} to {max(restoring[1:]) * 1e3:.0f}), "
                  f"pairs {middle:.3f} ({low:.3f} to {high:.3f}, worst {ratios[-1]:.3f}); cached {cached}" + (f"; {others} replies are others" if others else ""), flush=True)
            shutil.rmtree(work / rate)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
