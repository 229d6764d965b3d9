"""tests/bench/links.sh --smoke: two namespaces, a relayed link, every side answers. No assertion is on time."""
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from harness import BIN, MODEL, ROOT

LINKS = ROOT / "tests/bench/links.sh"


def test_smoke(tmp_path):
    chart = tmp_path / "links.svg"
    r = subprocess.run([LINKS, "--smoke", "--together", "--json", "--svg", chart], capture_output=True, text=True, timeout=600,
                       env={**os.environ, "TANDEM_BIN": str(BIN), "TANDEM_MODEL": str(MODEL)})
    if r.returncode == 77:
        pytest.skip(r.stderr.strip())
    assert r.returncode == 0, r.stderr[-2000:]
    out = json.loads(r.stdout)
    for kind in ("pairs", "pairs_t16"):
        (p,) = out[kind]
        assert (p["link_mbit"], p["delay_ms"], p["prompt"]) == (100, 20, 128)
        assert min(p["planner_ms"], p["cloud_only_ms"], p["edge_only_ms"], p["ratio_low95"]) > 0
        assert p["ratio"] == pytest.approx(p["planner_ms"] / min(p["cloud_only_ms"], p["edge_only_ms"]), abs=1e-3)
    (run,) = out["runs"]
    assert {m: len(rs) for m, rs in run["modes"].items()} == {"planner": 2, "cloud-only": 2, "edge-only": 2, "k8": 2}
    for mode, runs in run["modes"].items():
        for one in runs:
            if one["cut"]:
                continue
            assert 0 < one["ttft"] <= one["t16"]
            assert mode == "edge-only" or one["ttft"] >= 40  # the delay, there and back, is a floor
            assert mode != "k8" or one["sent"] > 128 * 576 * 2  # its rows went over the link
    assert xml.etree.ElementTree.parse(chart).getroot().tag.endswith("svg")


def test_the_bound_of_the_ratio():
    sys.path.insert(0, str(LINKS.parent))
    import links

    assert links.ratio_low95([(1.2, 1.0)]) == pytest.approx(1.2)
    assert links.ratio_low95([(2.0, 1.0)] * 4) == pytest.approx(2.0)
    # logarithms 0 and 0.2: mean 0.1, deviation 0.1414, t(1) = 6.314
    assert links.ratio_low95([(1.0, 1.0), (math.exp(0.2), 1.0)]) == pytest.approx(math.exp(0.1 - 6.314 * 0.1))
