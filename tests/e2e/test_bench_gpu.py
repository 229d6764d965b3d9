"""tests/gpu/bench.py with a program that answers in the place of tandem: what it asks, what it says is met, its exit codes."""
import json
import os
import subprocess
import sys

import pytest
from harness import BIN, ROOT

BENCH = ROOT / "tests/gpu/bench.py"
ANSWER = dict(prefill_tps=36000.0, prefill_ms=201.0, decode_step_ms=1.5, decode_of_floor=0.9, read_gb_s=4400.0, matmul_tflop_s=800.0, to_device_gb_s=55.0,
              host_of_step=0.004, swap_in_s=0.005, prefill_families=[dict(name="attention", gop_s=559000.0)],
              decode_families=[dict(name="products", gb_s=3300.0), dict(name="attention", gb_s=4300.0)])


def bench(tmp_path, answers, *arguments):
    """answers: [(words of the command line, answer | what it says before it fails)], the first that fits; else ANSWER."""
    program = tmp_path / "tandem"
    says = [f"*'{words}'*) " + (f"echo '{json.dumps(a)}';;" if isinstance(a, dict) else f"echo '{a}' >&2; exit 1;;") for words, a in [*answers, ("", ANSWER)]]
    program.write_text("#!/bin/sh\ncase \"$*\" in\n" + "\n".join(says) + "\nesac\n")
    program.chmod(0o755)
    r = subprocess.run([sys.executable, BENCH, "--bin", tmp_path, "--out", tmp_path / "out", *arguments], capture_output=True, text=True, timeout=600,
                       env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    rows = {line[:40].split("  ")[0]: line for line in r.stdout.splitlines()}
    return r, rows


def test_all_is_met(tmp_path):
    r, rows = bench(tmp_path, [])
    assert r.returncode == 0, r.stdout + r.stderr
    assert "at most 3.93 ms" in rows["decode, 1 sequence, 1K"] and rows["decode, 1 sequence, 1K"].endswith("yes")
    assert "1.000 times" in rows["1x128K: fast step / this"] and "40.2 times" in rows["prefill 128K / 16 GiB back"]
    lines = [json.loads(line) for line in (tmp_path / "out/bench.jsonl").read_text().splitlines()]
    options = {line["name"]: line["options"] for line in lines}
    assert len(options) == len(lines) and all(line["result"] == ANSWER for line in lines)
    assert "--deterministic" in options["1x32K det"] and "--kv-dtype int8" in options["128x1K int8"] and "--dtype q4_k" in options["q4_k 1x1K det"]
    assert (tmp_path / "out/table.txt").read_text() == r.stdout


def test_what_is_not_met_or_not_measured(tmp_path):
    slow = {**ANSWER, "decode_step_ms": 4.0}
    r, rows = bench(tmp_path, [("--batch 1 --prompt 1024 --gen 64 --repeat 3 --chunk 1024 --deterministic", slow),
                               ("--dtype bf16 --batch 1 --prompt 1024", slow), ("--prompt 131072", "out of memory")], "--only", "1x1K", "1x128K")
    assert r.returncode == 1
    assert rows["decode, 1 sequence, 1K"].endswith("no; 3.884 ms at 4,531 GB/s")
    assert "not measured" in rows["decode, 1 sequence, 128K"] and "out of memory" in r.stderr
    assert rows["host, 1 sequence, 1K, of a step"].endswith("yes")
    r, rows = bench(tmp_path, [("--deterministic", slow)], "--only", "128x1K")
    assert r.returncode == 1 and "0.375 times" in rows["128x1K: fast step / this"]
    r, rows = bench(tmp_path, [("", {**ANSWER, "decode_families": []})], "--only", "32x8K")
    assert r.returncode == 1 and "not measured" in r.stdout, r.stderr


def test_no_time_left(tmp_path):
    r, rows = bench(tmp_path, [], "--limit", "10", "--only", "1x32K", "1x1K")
    assert r.returncode == 1 and "not measured" in rows["decode, 1 sequence, 32K"] and rows["decode, 1 sequence, 1K"].endswith("yes")


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["--list"], 0), (["--only", "nothing"], 2), (["--bin", "/nowhere"], 2)])
def test_arguments(tmp_path, arguments, code):
    assert bench(tmp_path, [], *arguments)[0].returncode == code


def test_without_a_gpu(tmp_path):
    r, _ = bench(tmp_path, [("golden", "cannot measure cuda: no GPU: no device was found")])
    assert r.returncode == 77 and "no GPU" in r.stdout


def test_the_engine_says_what_is_read(tmp_path):
    r = subprocess.run([BIN / "tandem", "bench", "engine", "--model", ROOT / "tests/golden/tiny/llama-mha-tied.gguf", "--prompt", "8", "--gen", "2", "--json"],
                       capture_output=True, text=True, timeout=600, check=True)
    out = json.loads(r.stdout)
    of_a_gpu = {"decode_of_floor", "matmul_tflop_s", "to_device_gb_s", "host_of_step", "swap_in_s"}  # not measured here, and so not there
    assert set(ANSWER) - set(out) == of_a_gpu
    assert all(key.encode() in (BIN / "tandem").read_bytes() for key in of_a_gpu)
    assert not [key for key, value in out.items() if value == 0.0 and key not in ("dot_gop_s", "fma_gflop_s")]
    for kind in ("prefill_families", "decode_families"):
        assert {"name", "gop_s", "gb_s"} <= set(out[kind][0])
