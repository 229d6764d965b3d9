"""tandem bench trace: its counts are those of a second, naive program; its output and its refusals."""
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from harness import BIN

NAIVE = Path(__file__).parents[1] / "bench" / "replay_naive.py"


def tandem(*arguments, code=0):
    r = subprocess.run([BIN / "tandem", "bench", "trace", *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert r.returncode == code, r.stdout + r.stderr
    return r


def naive(*arguments):
    return subprocess.run([sys.executable, NAIVE, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=True).stdout


def test_counts_equal_a_naive_simulator(tmp_path):
    trace = tmp_path / "trace.jsonl"
    for seed in (1, 2):
        trace.write_text(naive("--make", seed, 160))
        expected = json.loads(naive(trace, "--sizes", "1,5,25"))
        got = {}
        for row in json.loads(tandem(trace, "--sizes", "1,5,25", "--json").stdout)["results"]:
            got.setdefault(row["policy"], []).append(row["hits"])
        assert got == expected
        assert expected["tandem"][0] > expected["lru"][0] > 0  # it is a trace on which there is something to win


def test_table_and_chart(tmp_path):
    trace, chart = tmp_path / "trace.jsonl", tmp_path / "hits.svg"
    trace.write_text(naive("--make", 1, 100))
    lines = tandem(trace, "--sizes", "3,10", "--policy", "lru", "--svg", chart).stdout.splitlines()
    assert len(lines) == 4 and "100 requests" in lines[0]
    assert lines[2].split()[:4] == ["3", "%", lines[2].split()[2], "lru"]
    tandem(trace, "--svg", chart)
    texts = [e.text for e in xml.etree.ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert {"tandem", "demoting", "lru", "s3fifo", "belady", "1", "30", "hits, % of all blocks asked for"} <= set(texts)


def test_refusals_are_one_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 2, "hash_ids": 1}\n')
    assert "line 2: " in tandem(bad, code=1).stderr
    for arguments, code in (((bad,), 1), ((tmp_path / "none",), 1), ((bad, "--sizes", "3,1"), 2), ((bad, "--sizes", "0"), 2),
                            ((bad, "--sizes", "nan"), 2), ((bad, "--policy", "mru"), 2)):
        assert len(tandem(*arguments, code=code).stderr.strip().splitlines()) == 1
    assert tandem(code=2).stderr.startswith("Usage: tandem bench trace FILE")
    good = tmp_path / "good.jsonl"
    good.write_text('{"timestamp": 1, "hash_ids": [1]}\n')
    assert "cannot write chart" in tandem(good, "--svg", tmp_path, code=1).stderr
