#!/usr/bin/env python3
"""Tandem's CPU engine beside llama.cpp's: same GGUF file, same threads, same lengths, runs that alternate.

usage: compare_llamacpp.py --model FILE.gguf[=TEST,TEST...] [--model ...] [--threads 2] [--pairs 5] [--seconds N] [--quick]
                           [--json] [--only prefill-512 ...] [--python PYTHON] [--tandem PROGRAM]

llama.cpp comes through llama-cpp-python, which the interpreter given by --python must have (this script itself needs
nothing). It must be built for the machine that it runs on; its source package does that by default:

    python3 -m venv ~/tandem-native
    CMAKE_ARGS=-DGGML_NATIVE=ON ~/tandem-native/bin/pip install --no-binary llama-cpp-python llama-cpp-python numpy gguf

(numpy and gguf are for make_model.py). A wheel built elsewhere may lack this machine's instructions: the script compares
what llama.cpp says of itself with what the CPU has, and warns.

How it measures. Each run is a process of its own, Tandem's and llama.cpp's in turn (A B A B ...), because other work on the
machine comes and goes over seconds; each round has one pair of every test, because its placement changes over minutes. Inside a run both do the same: load the file, then the work as often as `repeats`
below says, median of these. Reported: the median over the runs, the half of the distance between the quartiles as a
percentage of it, and the median of the ratios of the pairs, with the lowest and the highest. llama.cpp gets its defaults: steps
of 512 rows, f16 KV in one buffer, its own choice about flash attention; logits for the last row of a prompt and for each
decoded one, as in Tandem. `load` is from opening the file to the logits of one token, the file in the page cache. The last
column is of Tandem's own bench: of a prompt, which part of the arithmetic's peak its products reached; of decoding, which part of the
memory's read rate; both beside ceilings measured in the same run.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

CHUNK = 512
ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

# name: prompt tokens, decoded tokens, sequences, repeats in a run, what is reported, unit.
TESTS = {
    "prefill-512": (512, 0, 1, 3, "prefill", "tokens/s"),
    "prefill-2048": (2048, 0, 1, 1, "prefill", "tokens/s"),
    "decode-1": (64, 64, 1, 3, "decode", "tokens/s"),
    "decode-16": (64, 32, 16, 2, "decode", "tokens/s"),
    "load": (1, 0, 1, 1, "load", "ms"),
}
CPU_FLAGS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8"}


# ---- llama.cpp: runs in the interpreter that has it ------------------------------------------------------

class Llama:
    """A model and a context through the low-level bindings."""

    def __init__(self, path, threads, tokens, sequences):
        import ctypes
        import llama_cpp as lib
        self.lib, self.ctypes = lib, ctypes
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx = tokens * sequences
        params.n_batch = params.n_ubatch = CHUNK
        params.n_seq_max = sequences
        params.kv_unified = True  # one buffer for all sequences: not slower than one each where both were tried
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(max(CHUNK, sequences), 0, 1)

    def step(self, rows, logits_last_only):
        """rows: (sequence, position) of each."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (sequence, position) in enumerate(rows):
            b.token[i] = (position * 2654435761 % 2**32 >> 8) % self.vocabulary
            b.pos[i] = position
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = sequence
            b.logits[i] = i == len(rows) - 1 if logits_last_only else 1
        if self.lib.llama_decode(self.context, b) != 0:
            raise RuntimeError("llama_decode failed")
        return self.lib.llama_get_logits_ith(self.context, len(rows) - 1)[0]

    def run(self, prompt, gen, sequences):
        """Seconds of all prompts, one after the other, and of all decoding steps."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        start = time.perf_counter()
        for sequence in range(sequences):
            for at in range(0, prompt, CHUNK):
                self.step([(sequence, p) for p in range(at, min(at + CHUNK, prompt))], True)
        middle = time.perf_counter()
        for position in range(prompt, prompt + gen):
            self.step([(s, position) for s in range(sequences)], False)
        return middle - start, time.perf_counter() - middle


def worker(job):
    """One run of llama.cpp; prints one line of JSON."""
    import llama_cpp
    start = time.perf_counter()
    llama = Llama(job["model"], job["threads"], job["prompt"] + job["gen"], job["sequences"])
    runs = [llama.run(job["prompt"], job["gen"], job["sequences"])]
    loaded = time.perf_counter() - start
    runs += [llama.run(job["prompt"], job["gen"], job["sequences"]) for _ in range(job["repeats"] - 1)]
    prefill, decode = (statistics.median(times) for times in zip(*runs))
    print(json.dumps({
        "prefill": job["prompt"] * job["sequences"] / prefill,
        "decode": job["gen"] * job["sequences"] / decode if job["gen"] else 0.0, "load": loaded * 1e3,
        "version": "llama-cpp-python " + llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode().strip(" |")}))


# ---- runs ------------------------------------------------------------------------------------------------

def output_of(command, what):
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        sys.exit(f"compare_llamacpp.py: {what} failed: {reason}")
    return json.loads(lines[-1])


def run_llama(options, model, test):
    prompt, gen, sequences, repeats = test[:4]
    job = {"model": model, "threads": options.threads, "prompt": prompt, "gen": gen, "sequences": sequences, "repeats": repeats}
    return output_of([options.python, os.path.abspath(__file__), "--worker", json.dumps(job)], f"{options.python} with llama-cpp-python")


def run_tandem(options, model, test):
    prompt, gen, sequences, repeats = test[:4]
    command = [options.tandem, "bench", "engine", "--model", model, "--threads", options.threads, "--prompt", prompt, "--gen", gen,
               "--batch", sequences, "--repeat", repeats, "--chunk", CHUNK, "--json"]
    r = output_of([str(c) for c in command], options.tandem)
    key, part = ("decode_families", "of_read") if test[4] == "decode" else ("prefill_families", "of_peak")
    products = [f for f in r[key] if f["name"].startswith("products")]
    return {"prefill": r["prefill_tps"], "decode": r["decode_tps"], "load": r["load_s"] * 1e3 + r["prefill_ms"], "isa": r["isa"],
            "part": max(products, key=lambda f: f["ms"])[part] if products else 0.0,
            "ceilings": [r["dot_gop_s"], r["fma_gflop_s"], r["read_gb_s"]]}


def spread(values):
    """Half of the distance between the quartiles, in per cent of the median."""
    if len(values) < 3:
        return 100 * (max(values) - min(values)) / 2 / statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return 100 * (high - low) / 2 / statistics.median(values)


class Progress:
    """One line that is rewritten, on a terminal only."""

    def __init__(self, total):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.shown = sys.stderr.isatty()

    def step(self, what):
        if self.shown:
            spent = time.monotonic() - self.start
            left = f", about {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            print(f"\r\033[K[{self.done}/{self.total}] {what}{left}", end="", file=sys.stderr, flush=True)
        self.done += 1

    def end(self):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def measure(options, cases, progress):
    """Round by round, a pair of each case; ends after options.pairs rounds or behind the pair in which the time is up."""
    runs = {case: ([], []) for case in cases}
    for _ in range(options.pairs):
        for model, name in cases:
            if options.seconds and time.monotonic() - progress.start > options.seconds:
                return runs
            mine, theirs = runs[model, name]
            label = f"{os.path.basename(model)} {name}, pair {len(mine) + 1}"
            progress.step(f"{label}: tandem")
            mine.append(run_tandem(options, model, TESTS[name]))
            progress.step(f"{label}: llama.cpp")
            theirs.append(run_llama(options, model, TESTS[name]))
    return runs


def result_of(model, name, mine, theirs):
    test = TESTS[name]
    key = test[4]
    a, b = [r[key] for r in mine], [r[key] for r in theirs]
    ratios = [y / x if key == "load" else x / y for x, y in zip(a, b)]  # above 1: Tandem is faster
    return {"model": os.path.basename(model), "test": name, "unit": test[5], "pairs": len(ratios),
            "tandem": statistics.median(a), "tandem_spread_percent": spread(a), "tandem_runs": a,
            "llamacpp": statistics.median(b), "llamacpp_spread_percent": spread(b), "llamacpp_runs": b,
            "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
            "part": statistics.median(r["part"] for r in mine), "part_runs": [r["part"] for r in mine],
            "ceilings": [statistics.median(c) for c in zip(*(r["ceilings"] for r in mine))],
            "isa": mine[0]["isa"], "llamacpp_version": theirs[0]["version"], "llamacpp_system": theirs[0]["system"]}


def cpu():
    """Its name and what it can do."""
    name, flags = platform.processor() or platform.machine(), set()
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = set(value.split())
    except OSError:
        pass
    return name, flags


def missing_instructions(system, flags):
    return [theirs for ours, theirs in CPU_FLAGS.items() if ours in flags and f"{theirs} = 1" not in system]


def print_head(options, cpu_name, first):
    print(f"{cpu_name}, {options.threads} threads; tandem {first['isa']}; {first['llamacpp_version']}: {first['llamacpp_system']}")
    print(f"{'model':<28} {'test':<12} {'n':>2} {'tandem':>9} {'±':>4} {'llama.cpp':>10} {'±':>4}  {'unit':<9} {'ratio':>6}  "
          f"{'lowest..highest':<15}  int8 GOP/s, f32 GFLOP/s, GB/s; part")


def print_row(r):
    what = {"tokens/s": "of peak" if r["test"].startswith("prefill") else "of read rate"}.get(r["unit"], "")
    part = f"{100 * r['part']:.0f}% {what}" if what else ""
    print(f"{r['model'][-28:]:<28} {r['test']:<12} {r['pairs']:>2} {r['tandem']:>9.1f} {r['tandem_spread_percent']:>3.0f}% "
          f"{r['llamacpp']:>10.1f} {r['llamacpp_spread_percent']:>3.0f}%  {r['unit']:<9} {r['ratio']:>5.2f}x  "
          f"{r['ratio_min']:>5.2f}..{r['ratio_max']:<8.2f}  {r['ceilings'][0]:.0f}, {r['ceilings'][1]:.0f}, {r['ceilings'][2]:.0f}; {part}")


def cases_of(options):
    """(file, test) of each --model."""
    usual = options.only or [n for n in TESTS if not (options.quick and n == "prefill-2048")]
    cases = []
    for model in options.model:
        path, _, names = model.partition("=")
        cases += [(path, name) for name in (names.split(",") if names else usual)]
    return cases


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="FILE[=TEST,...]",
                        help="a GGUF file, and its tests if not those of --only; may be given several times")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="compute threads of each (default: all cores)")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each program and test (default: 5)")
    parser.add_argument("--seconds", type=float, metavar="N", help="begin no pair after so long, whatever --pairs says")
    parser.add_argument("--only", action="append", choices=TESTS, metavar="TEST", help="only this one: " + ", ".join(TESTS))
    parser.add_argument("--quick", action="store_true", help="two pairs, and no prompt of 2048")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--python", default=sys.executable, help="the Python that has llama-cpp-python (default: this one)")
    parser.add_argument("--tandem", default=os.path.join(ROOT, "build", "release", "bin", "tandem"), metavar="PROGRAM",
                        help="the tandem command (default: build/release/bin/tandem)")
    options = parser.parse_args()
    if options.quick:
        options.pairs = min(options.pairs, 2)
    options.cases = cases_of(options)
    for path in [*(model for model, _ in options.cases), options.tandem]:
        if not os.path.exists(path):
            parser.error(f"{path} is not there")
    for _, name in options.cases:
        if name not in TESTS:
            parser.error(f"there is no test {name}: {', '.join(TESTS)}")
    return options


def main():
    options = arguments()
    cpu_name, flags = cpu()
    progress = Progress(len(options.cases) * options.pairs * 2)
    runs = measure(options, options.cases, progress)
    progress.end()
    results = [result_of(model, name, *pair) for (model, name), pair in runs.items() if pair[1]]
    lacking = missing_instructions(results[0]["llamacpp_system"], flags)
    if lacking:
        print(f"warning: this llama.cpp is not built for this machine (it lacks {', '.join(lacking)}): see --help", file=sys.stderr)
    if options.json:
        print(json.dumps({"cpu": cpu_name, "threads": options.threads, "llamacpp_native": not lacking, "results": results}, indent=1))
        return
    print_head(options, cpu_name, results[0])
    for r in results:
        print_row(r)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
