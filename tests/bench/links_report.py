"""links_report: what links.py measured, as a table and as a chart. No measuring here."""
import math
import statistics

COLOURS = {"cloud-only": "#2b6cb0", "edge-only": "#b7791f", "planner": "#c53030", "best fixed k": "#718096"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 190, 56, 30, 34
HEAD = "   mode            TTFT ms  spread        T16 ms  spread       gap ms    KiB sent  cloud s  prefill s"


def median(runs, what):
    return statistics.median(r[what] for r in runs)


def lines(shape, runs, ttft, t16):
    """A block of the table: a line for each mode; spread: least and most."""
    out = ["{} Mbit/s, {} ms, {} tokens: planner / better side {:.3f} (T16 {:.3f}), at least {:.3f} ({:.3f})".format(
        *shape, ttft["ratio"], t16["ratio"], ttft["ratio_low95"], t16["ratio_low95"]), HEAD]
    for mode, rs in runs.items():
        cells = [f"{median(rs, w):9.0f}  {min(r[w] for r in rs):.0f}-{max(r[w] for r in rs):.0f}".ljust(24) for w in ("ttft", "t16")]
        split = sorted({r["timings"].get("edge_layers", 0) for r in rs})
        out.append(f"   {mode:13}{cells[0]}{cells[1]}{median(rs, 'gap'):8.0f} {median(rs, 'sent') / 1024:11.1f} {median(rs, 'cpu_s'):8.2f}"
                   + f"{statistics.median(r['timings'].get('cloud_prefill_ms', 0) for r in rs) / 1e3:11.2f}"
                   + (f"   k = {', '.join(map(str, split))}" if mode in ("planner", "cloud-cost") else "") + ("   cut off" if any(r["cut"] for r in rs) else ""))
    return "\n".join(out)


def summary(pairs, pairs_t16, paced):
    out = [f"compute {'paced at %g us a token and layer' % paced if paced else 'as it is'}; ratio_low95: t on logarithms, one-sided"]
    for name, ps in (("TTFT", pairs), ("T16", pairs_t16)):
        worst = max(ps, key=lambda p: p["ratio_low95"])
        over = sum(p["ratio_low95"] > 1.05 for p in ps)
        mean = math.exp(statistics.mean(math.log(p["ratio"]) for p in ps))
        out.append(f"{name}: geometric mean {mean:.3f}, {over} of {len(ps)} above 1.05, worst {worst['ratio_low95']:.3f} "
                   f"({worst['link_mbit']} Mbit/s, {worst['delay_ms']} ms, {worst['prompt']} tokens)")
    return "\n".join(out)


def series(runs, what):
    """{line of the chart: ms}; of the fixed splits the best."""
    values = {m: median(rs, what) for m, rs in runs.items()}
    fixed = [v for m, v in values.items() if m.startswith("k")]
    out = {m: values[m] for m in COLOURS if m in values}
    return {**out, "best fixed k": min(fixed + [values["cloud-only"]])} if fixed else out


def panel(x, y, title, points):
    """points: {line: [(rate, ms), ...]}; rates on a logarithmic scale."""
    rates = sorted({r for line in points.values() for r, _ in line})
    top = max(ms for line in points.values() for _, ms in line) * 1.05
    span = math.log(rates[-1] / rates[0]) or 1.0

    def at(rate, ms):
        return x + 8 + (WIDTH - 16) * math.log(rate / rates[0]) / span, y + HEIGHT - HEIGHT * ms / top

    out = [f'<text x="{x}" y="{y - 8}" font-weight="bold">{title}</text>',
           f'<path d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}" fill="none" stroke="#444"/>']
    for part in (0, 0.5, 1):
        out.append(f'<text x="{x - 4}" y="{y + HEIGHT * (1 - part) + 4:.0f}" text-anchor="end">{top * part / 1e3:.2f}</text>')
    for rate in rates:
        out.append(f'<text x="{at(rate, 0)[0]:.0f}" y="{y + HEIGHT + 14}" text-anchor="middle">{rate}</text>')
    for name, line in points.items():
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in sorted(line)))
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{COLOURS[name]}"/>' for px, py in (at(*p) for p in line)]
    return out


def chart(results):
    """A row of panels for each delay and prompt: TTFT and T16 in seconds over the link's rate."""
    rows = sorted({(s[1], s[2]) for s, _ in results})
    height, out = len(rows) * (HEIGHT + TOP + GAP) + 50, []
    for i, (delay, prompt) in enumerate(rows):
        for j, what in enumerate(("ttft", "t16")):
            points = {}
            for shape, runs in results:
                if shape[1:] == (delay, prompt):
                    for name, ms in series(runs, what).items():
                        points.setdefault(name, []).append((shape[0], ms))
            out += panel(LEFT + j * (WIDTH + LEFT + 20), TOP + i * (HEIGHT + TOP + GAP), f"{what.upper()}, s: {prompt} tokens, {delay} ms", points)
    for j, (name, colour) in enumerate(COLOURS.items()):
        out.append(f'<text x="{LEFT + j * 130}" y="{height - 26}" fill="{colour}">{name}</text>')
    out.append(f'<text x="{LEFT}" y="{height - 8}">rate of the link in Mbit/s, to the right; less is better</text>')
    width = 2 * (WIDTH + LEFT + 20) + 20
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
            f'<rect width="{width}" height="{height}" fill="white"/>' + "\n".join(out) + "</svg>\n")
