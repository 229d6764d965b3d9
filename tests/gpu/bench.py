#!/usr/bin/env python3
"""bench: every number that is wanted of the CUDA engine, on one GPU, in one go of about six minutes: what was measured, its limit, and whether it is met.

    `tandem bench engine` in the shape of Llama-3-8B, a process for each case, one after the other. Limits hold on one H200. Where a step is over its
    limit, the table says what it would take at the read rate that the limits were made for, as cards of this name differ by up to 7 %.
    8-bit pages have no limit; they are measured beside f16.

Writes OUT/bench.jsonl (a line a case: name, options, seconds, and the bench's own JSON or its error) and OUT/table.txt; progress goes to stderr, the table
to stdout. Exit code: 0 all limits met, 1 not all (or not measured), 2 wrong usage, 77 no GPU here.
"""
import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import time

READ_GB_S = 4531  # of the card that the limits of steps were made for
DET_SHARE = 0.40  # of the fast mode's speed


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    seconds: int  # that it should take, weights made and ceilings measured included
    options: str


def step(batch, prompt, repeat=2, gen=64):
    return f"--batch {batch} --prompt {prompt} --gen {gen} --repeat {repeat} --chunk {min(prompt, 4096)}"


PROMPT_8K, PROMPT_32K, PROMPT_128K = step(1, 8192, 5, 32), step(1, 32768, 3), step(1, 131072, 1)
FAST = [
    Case("1x1K", 7, step(1, 1024, 3)),
    Case("1x8K", 8, PROMPT_8K),
    Case("1x32K", 13, PROMPT_32K),
    Case("1x128K", 30, PROMPT_128K),
    Case("32x1K", 9, step(32, 1024)),
    Case("128x1K", 14, step(128, 1024)),
    Case("32x8K", 16, step(32, 8192, 1, 32)),
    Case("q4_k 1x1K", 5, "--dtype q4_k " + step(1, 1024, 3)),
    Case("q4_k 1x8K", 6, "--dtype q4_k " + step(1, 8192, 3, 32)),
    Case("q8_0 1x1K", 6, "--dtype q8_0 " + step(1, 1024, 3)),
    Case("q8_0 1x8K", 7, "--dtype q8_0 " + step(1, 8192, 3, 32)),
    Case("swap", 30, "--prompt 64 --gen 1 --swap 131072 --repeat 5"),
]
DETERMINISTIC = [
    Case("1x1K det", 7, step(1, 1024, 3)),
    Case("1x8K det", 8, step(1, 8192, 3, 32)),
    Case("1x32K det", 14, step(1, 32768, 1)),
    Case("1x128K det", 45, step(1, 131072, 1, 32)),
    Case("32x1K det", 10, step(32, 1024)),
    Case("128x1K det", 16, step(128, 1024)),
    Case("32x8K det", 18, step(32, 8192, 1, 32)),
    Case("q4_k 1x1K det", 5, "--dtype q4_k " + step(1, 1024, 3)),
    Case("q8_0 1x1K det", 6, "--dtype q8_0 " + step(1, 1024, 3)),
]
EIGHT_BIT = [Case(f"{name} {kind}", seconds, options) for kind in ("fp8", "int8") for name, seconds, options in (
    ("128x1K", 14, step(128, 1024, 1)), ("32x8K", 15, step(32, 8192, 1, 32)), ("1x32K", 10, step(1, 32768, 1)))]


def command(case):
    kind = case.name.rsplit(" ", 1)[-1]
    more = {"det": " --deterministic", "fp8": " --kv-dtype fp8", "int8": " --kv-dtype int8"}.get(kind, "")
    dtype = "" if "--dtype" in case.options else "--dtype bf16 "
    return f"bench engine --device cuda --shape llama-8b --json {dtype}{case.options}{more}".split()


# --- what is wanted ---------------------------------------------------------------------------------------------------

def family(kind, name, what):
    return lambda r: next((f[what] for f in r[kind] if f["name"] == name), None) or None


def key(name, scale=1.0):
    return lambda r: r[name] * scale


@dataclasses.dataclass(frozen=True)
class Wanted:
    what: str
    case: str
    value: object  # of the case's result; None: it has none
    unit: str
    limit: float = None
    least: bool = False  # the limit is what it has to reach, not what it may take
    reads: bool = False  # takes as long as the memory does
    beside: str = None  # the value is that of this case over this one's


MS, STEP = key("prefill_ms"), key("decode_step_ms")
WANTED = [
    Wanted("decode, 1 sequence, 1K", "1x1K", STEP, "ms", 3.93, reads=True),
    Wanted("decode, 1 sequence, 32K", "1x32K", STEP, "ms", 5.1, reads=True),
    Wanted("decode, 1 sequence, 128K", "1x128K", STEP, "ms", 8.4, reads=True),
    Wanted("decode, 32 sequences, 1K", "32x1K", STEP, "ms", 5.3, reads=True),
    Wanted("decode, 128 sequences, 1K", "128x1K", STEP, "ms", 8.9, reads=True),
    Wanted("prefill 8K", "1x8K", MS, "ms", 230),
    Wanted("prefill 32K", "1x32K", MS, "ms", 1450),
    Wanted("flash attention of 32K", "1x32K", family("prefill_families", "attention", "gop_s"), "GFLOP/s", 350e3, True),
    Wanted("attention of 32 x 8K, KV", "32x8K", family("decode_families", "attention", "gb_s"), "GB/s", 4000, True),
    Wanted("Q4_K decode, 1 sequence, 1K", "q4_k 1x1K", STEP, "ms", 2.2),
    Wanted("Q8_0 decode, 1 sequence, 1K", "q8_0 1x1K", STEP, "ms", 2.6),
    Wanted("Q4_K prefill 8K", "q4_k 1x8K", key("prefill_tps"), "tokens/s", 20000, True),
    Wanted("Q8_0 prefill 8K", "q8_0 1x8K", key("prefill_tps"), "tokens/s"),
    Wanted("16 GiB back into pages", "swap", key("swap_in_s"), "s", 0.36),
    Wanted("prefill 128K / 16 GiB back", "swap", key("swap_in_s", 1e3), "times", 25, True, beside="1x128K"),
    Wanted("host, 1 sequence, 1K, of a step", "1x1K", key("host_of_step", 100), "%", 3),
    Wanted("decode, 32 sequences, 8K", "32x8K", STEP, "ms"),
] + [w for name in (c.name.removesuffix(" det") for c in DETERMINISTIC) for w in (
    Wanted(f"{name} deterministic: decode", f"{name} det", STEP, "ms"),
    Wanted(f"{name}: fast step / this", f"{name} det", STEP, "times", DET_SHARE, True, beside=name),
) + ((Wanted(f"{name}: fast prefill / this", f"{name} det", MS, "times", DET_SHARE, True, beside=name),) if "1x" in name else ())] + [
    Wanted(f"{c.name}: decode", c.name, STEP, "ms") for c in EIGHT_BIT] + [
    Wanted(f"{c.name}: prefill", c.name, MS, "ms") for c in EIGHT_BIT if "1x" in c.name]


def value_of(w, results):
    """None: not measured."""
    if results.get(w.case) is None or (w.beside and results.get(w.beside) is None):
        return None
    own = w.value(results[w.case])
    if not w.beside:
        return own
    other = MS if w.case == "swap" else w.value
    return other(results[w.beside]) / own if own else None


def shown(x, unit):
    return f"{x:,.{3 if x < 10 else 1 if x < 1000 else 0}f} {unit}"


def row(w, results):
    """(cells, is the limit met); no limit: met as soon as it is measured."""
    x = value_of(w, results)
    if x is None:
        return (w.what, "not measured", "", "no"), False
    met = w.limit is None or (x >= w.limit if w.least else x <= w.limit)
    limit = "" if w.limit is None else f"at {'least' if w.least else 'most'} {w.limit:,g} {w.unit}"
    said = "" if w.limit is None else "yes" if met else "no"
    if w.reads and not met:
        said += f"; {shown(x * results[w.case]['read_gb_s'] / READ_GB_S, w.unit)} at {READ_GB_S:,} GB/s"
    return (w.what, shown(x, w.unit), limit, said), met


def table(cases, results):
    """(text, are all limits met) of what these cases measure."""
    names = {c.name for c in cases}
    rows, all_met = [("", "measured", "limit", "met")], True
    for w in WANTED:
        if w.case in names and (not w.beside or w.beside in names):
            cells, met = row(w, results)
            rows.append(cells)
            all_met = all_met and met
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    lines = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:<{widths[2]}}  {r[3]}".rstrip() for r in rows]
    rates = [r for r in results.values() if r]
    for name, unit in (("read_gb_s", "GB/s read"), ("matmul_tflop_s", "TFLOP/s of products"), ("to_device_gb_s", "GB/s from the host")):
        if rates:
            lines.append(f"ceilings: {min(r[name] for r in rates):,.0f} to {max(r[name] for r in rates):,.0f} {unit}")
    return "\n".join(lines), all_met


# --- running ----------------------------------------------------------------------------------------------------------

def run(tandem, case):
    """(result, error): one of them is None."""
    try:
        r = subprocess.run([tandem, *command(case)], capture_output=True, text=True, timeout=3 * case.seconds + 30)
    except subprocess.TimeoutExpired as e:
        return None, f"ended after {e.timeout:.0f} s"
    if r.returncode:
        return None, r.stderr.strip() or f"exit code {r.returncode}"
    return json.loads(r.stdout), None


def run_all(tandem, cases, limit_s, lines):
    begun, results = time.monotonic(), {}
    for i, case in enumerate(cases):
        passed = time.monotonic() - begun
        print(f"[{i + 1}/{len(cases)}] {passed:4.0f} s  {case.name}, about {case.seconds} s … ", end="", file=sys.stderr, flush=True)
        result, error = (None, "no time left") if passed + case.seconds > limit_s else run(tandem, case)
        took = time.monotonic() - begun - passed
        results[case.name] = result
        line = {"name": case.name, "options": " ".join(command(case)), "seconds": round(took, 1)}
        print(json.dumps({**line, "error": error} if error else {**line, "result": result}), file=lines, flush=True)
        print(error or f"{result['decode_step_ms']:.3f} ms a step, {result['prefill_ms']:.1f} ms a prompt ({took:.0f} s)", file=sys.stderr, flush=True)
    return results


def no_gpu(tandem):
    """Why nothing can be measured here, or None."""
    model = pathlib.Path(__file__).resolve().parents[1] / "golden/tiny/llama-mha-tied.gguf"
    r = subprocess.run([tandem, *"bench engine --device cuda --prompt 1 --gen 0 --model".split(), model], capture_output=True, text=True)
    return r.stderr.strip() if "without CUDA" in r.stderr or "no GPU" in r.stderr else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/release/bin", help="where tandem is (%(default)s)")
    parser.add_argument("--out", default="build/gpu-bench", help="where bench.jsonl and table.txt go (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="these cases alone; a word of their names (det, fp8, 1x32K) takes all that have it")
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="begin no case that would end later (%(default)g)")
    parser.add_argument("--list", action="store_true", help="the cases, what each should take, and its command")
    args = parser.parse_args()
    every = FAST + DETERMINISTIC + EIGHT_BIT
    cases = [c for c in every if not args.only or c.name in args.only or set(args.only) & set(c.name.split())]
    if not cases:
        parser.error("there is no such case; see --list")
    if args.list:
        for c in cases:
            print(f"{c.name:<14} {c.seconds:3} s  tandem {' '.join(command(c))}")
        print(f"together {sum(c.seconds for c in cases)} s")
        return 0
    tandem = pathlib.Path(args.bin) / "tandem"
    if not tandem.exists():
        parser.error(f"there is no {tandem}; build it, or name its folder with --bin")
    why = no_gpu(tandem)
    if why:
        print(why)
        return 77
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "bench.jsonl", "w") as lines:
        results = run_all(tandem, cases, args.limit, lines)
    text, met = table(cases, results)
    (out / "table.txt").write_text(text + "\n")
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
