#!/usr/bin/env python3
"""ask.py: one streamed chat request, shown as it comes; and the table of the quickstart. Standard library only.

  ask.py --url URL --out FILE [--conversation ID] (--message TEXT | --message-file FILE)
  ask.py --table FIRST.json SECOND.json
"""
import argparse
import json
import sys
import time
import urllib.error
import urllib.request


def ask(url, message, conversation, out):
    body = {"messages": [{"role": "user", "content": message}], "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": 96, "temperature": 0.7, "seed": 7, "timings": True}
    if conversation:
        body["conversation"] = conversation
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started = time.monotonic()
    first = None
    summary = {"usage": {}, "timings": {}, "conversation": conversation}
    try:
        with opener.open(request, timeout=300) as reply:
            summary["conversation"] = reply.headers.get("X-Conversation-Id") or conversation
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit("ask.py: the reply failed: " + event["error"]["message"])
                for choice in event.get("choices", []):
                    text = choice.get("delta", {}).get("content") or ""
                    if text and first is None:
                        first = time.monotonic() - started
                    print(text, end="", flush=True)
                for part in ("usage", "timings"):
                    summary[part] = event.get(part) or summary[part]
    except urllib.error.HTTPError as error:
        sys.exit(f"ask.py: {error.code}: {error.read().decode(errors='replace')}")
    print()
    summary["client_first_token_ms"] = (first or 0) * 1000
    summary["client_total_ms"] = (time.monotonic() - started) * 1000
    with open(out, "w") as f:
        json.dump(summary, f)


def table(paths):
    turns = [json.load(open(path)) for path in paths]

    def row(label, value):
        print(f"  {label:<34}" + "".join(f"{value(t):>18}" for t in turns))

    def timing(name, unit="ms", digits=0):
        return lambda t: f"{t['timings'].get(name, 0):.{digits}f} {unit}".strip()

    def ratio(t):
        sent, raw = t["timings"].get("uplink_bytes", 0), t["timings"].get("uplink_raw_bytes", 0)
        return f"{raw / sent:.2f} x" if sent else "-"

    print(f"  {'':<34}{'first turn':>18}{'after kill -9':>18}")
    row("prompt tokens", lambda t: t["usage"]["prompt_tokens"])
    row("  of these cached (memory/disk)", lambda t: "{} ({}/{})".format(
        t["usage"]["prompt_tokens_details"]["cached_tokens"], t["timings"].get("cached_memory_tokens", 0),
        t["timings"].get("cached_disk_tokens", 0)))
    row("edge prefill, layers [0,k)", lambda t: f"{t['timings'].get('edge_prefill_tokens', 0)} tok {t['timings'].get('edge_prefill_ms', 0):.0f} ms")
    row("  k", lambda t: t["timings"].get("edge_layers", 0))
    row("uplink", lambda t: f"{t['timings'].get('uplink_bytes', 0) / 1024:.1f} KiB")
    row("  compression (f16 KV, f32 rows)", ratio)
    row("cloud prefill, layers [k,L)", lambda t: f"{t['timings']['cloud_prefill_tokens']} tok {t['timings']['cloud_prefill_ms']:.0f} ms"
        if "cloud_prefill_ms" in t["timings"] else "not told")
    row("time to first token", timing("first_token_ms"))
    row("reply", lambda t: f"{t['usage']['completion_tokens']} tok {t['timings'].get('tokens_per_s', 0):.1f}/s")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url")
    p.add_argument("--out")
    p.add_argument("--conversation")
    p.add_argument("--message")
    p.add_argument("--message-file")
    p.add_argument("--table", nargs=2)
    a = p.parse_args()
    if a.table:
        return table(a.table)
    message = a.message or open(a.message_file).read()
    return ask(a.url, message, a.conversation, a.out)


if __name__ == "__main__":
    sys.exit(main())
