"""A device with a valid token that lies, and clients that do not behave: only they suffer."""
import concurrent.futures
import contextlib
import os
import random
import shutil
import socket
import ssl
import struct
import subprocess

import httpx
import openai
import pytest

import mini_edge as mini
from conftest import client_of
from harness import BIN, MODEL, Cloud, Edge, wait_until
from mini_edge import BLOCK, Closed, MiniEdge, Model
from test_faults import preload  # noqa: F401: a fixture

TEXT = "The harbour master counts the boats at dusk. Some are blue, some are green, and one has no colour at all. " * 6
EDGE_LAYERS = 2


def http_of(cloud, token):
    return httpx.Client(base_url=cloud.url, headers={"Authorization": f"Bearer {token}"}, verify=ssl.create_default_context(cafile=cloud.ca), trust_env=False, timeout=600)


def completion(cloud, token, prompt, **more):
    """(text, cached tokens) of a direct request that computes or reads all KV at the cloud."""
    ask = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    with http_of(cloud, token) as http:
        r = http.post("/v1/completions", json=ask).raise_for_status().json()
    return r["choices"][0]["text"], r["usage"]["prompt_tokens_details"]["cached_tokens"]


def upload(edge, ids, rng, layers=EDGE_LAYERS, good_crc=True):
    """A generation whose lowest layers this device claims to have computed, all blocks but the first; its rows and KV are noise."""
    stream = edge.open(ids)
    count = len(ids) - BLOCK
    edge.plan(stream, 1, (0, BLOCK, 0), (BLOCK, count, layers))
    edge.generate(stream, 6)
    for first in range(BLOCK, len(ids), BLOCK):
        rows = min(BLOCK, len(ids) - first)
        values = [rng.uniform(-2, 2) for _ in range(Model.width)]
        edge.hidden(stream, 1, first, rows, layers, struct.pack(f"<{Model.width}f", *values) * rows)
        noise = struct.pack(f"<{Model.head_dim}e", *[rng.uniform(-3, 3) for _ in range(Model.head_dim)]) * (rows * Model.kv_heads)
        for layer in range(layers):
            for is_value in (0, 1):
                edge.kv(stream, 1, first // BLOCK, layer, is_value, mini.piece(first // BLOCK, layer, is_value, noise, count=rows, crc=None if good_crc else 7))
    return edge.reply(stream)


def test_wrong_kv_stays_with_its_uploader(tmp_path):
    """Noise under the right ids, that claims to be lossless and the cloud's own; in memory, and from disk after a restart."""
    c = Cloud(tmp_path)
    alice, bob, eve = c.new_token("acme", "alice"), c.new_token("acme", "bob"), c.new_token("evil", "eve")
    c.start()
    try:
        with http_of(c, alice) as http:
            ids = http.post("/tokenize", json={"content": TEXT}).raise_for_status().json()["tokens"]
            whole = (len(ids) - 1) // BLOCK * BLOCK
            edge = MiniEdge(c, alice)
            reply, _ = upload(edge, ids, random.Random(1))
            edge.close()
            wrong = http.post("/detokenize", json={"tokens": reply}).json()["content"]
        truth, cached = completion(c, eve, TEXT)
        assert cached == 0, "another tenant"
        assert wrong != truth, "control: what was uploaded changes the uploader's reply"
        for restarted in (False, True):
            if restarted:
                assert c.stop() == 0, c.log()[-2000:]
                c.start()
            poisoned, cached = completion(c, alice, TEXT, fidelity="exact")
            assert cached == whole and poisoned != truth, "control: the uploader's next request does find it"
        text, cached = completion(c, bob, TEXT, fidelity="any")
        assert cached == BLOCK, "a colleague finds the block that the cloud computed, and nothing else of the upload"
        assert text == truth
        for fidelity in ("any", "exact"):
            assert completion(c, bob, TEXT, fidelity=fidelity) == (truth, whole), "control: a colleague finds what the cloud computed for him"
        assert completion(c, alice, TEXT, cache=False)[0] == truth
        assert completion(c, eve, TEXT)[0] == truth
    finally:
        c.kill()


# ---- hostile frames ----


def said(edge):
    """How the cloud ends a stream or the connection."""
    try:
        while True:
            kind, _, header, _ = edge.receive()
            if kind == mini.ERROR:
                return header.get(2, b"").decode()
    except (Closed, OSError) as e:
        return str(e)


IDS = list(range(300, 400))
ROW = struct.pack(f"<{Model.width}f", *[0.5] * Model.width)
VALUES = bytes(2 * BLOCK * Model.kv_heads * Model.head_dim)


def planned(edge, *ranges):
    stream = edge.open(IDS, no_cache=True)
    edge.plan(stream, 1, *(ranges or [(0, 100, EDGE_LAYERS)]))
    return stream


VIOLATIONS = {
    "too many layers": (lambda e: planned(e, (0, 100, Model.layers + 1)), "layers"),
    "plan leaves the prompt": (lambda e: planned(e, (0, 101, 2)), "leaves the prompt"),
    "ranges overlap": (lambda e: planned(e, (0, 64, 2), (32, 68, 0)), "PLAN frame refused"),
    "range ends within a block": (lambda e: planned(e, (0, 65, 2), (65, 35, 0)), "within a block"),
    "rows before the plan": (lambda e: e.hidden(e.open(IDS), 1, 0, 1, 2, ROW), "before their plan"),
    "rows that are not numbers": (lambda e: e.hidden(planned(e), 1, 0, 1, 2, struct.pack("<f", float("nan")) * Model.width), "not finite"),
    "rows outside of the plan": (lambda e: e.hidden(planned(e), 1, 99, 2, 2, ROW * 2), "outside of the planned range"),
    "rows of another size": (lambda e: e.hidden(planned(e), 1, 0, 2, 2, ROW), "bytes"),
    "rows of another layer": (lambda e: e.hidden(planned(e), 1, 0, 1, 3, ROW), "layer"),
    "a piece before the plan": (lambda e: e.kv(e.open(IDS), 1, 0, 0, 0, mini.piece(0, 0, 0, VALUES)), "before its plan"),
    "a piece of another layer": (lambda e: e.kv(planned(e), 1, 0, 2, 0, mini.piece(0, 2, 0, VALUES)), "not in the plan"),
    "a piece of another block": (lambda e: e.kv(planned(e), 1, 9, 0, 0, mini.piece(9, 0, 0, VALUES)), "not in the plan"),
    "a piece of another shape": (lambda e: e.kv(planned(e), 1, 0, 0, 0, mini.piece(0, 0, 0, VALUES, heads=6, dim=32)), "shape"),
    "a piece that is not a number": (lambda e: e.kv(planned(e), 1, 0, 0, 0, mini.piece(0, 0, 0, struct.pack("<e", float("nan")) * (len(VALUES) // 2))), "not finite"),
    "a part that continues nothing": (lambda e: e.send(mini.KV_BLOCK, planned(e), mini.fields(1, 0, 0, 0, 10, 20), b"12345"), "continues nothing"),
    "65 streams": (lambda e: [e.open(IDS[:4]) for _ in range(65)], "64 streams"),
    "a stream number that was used": (lambda e: (e.open(IDS), setattr(e, "stream", -1), e.open(IDS)), "out of order"),
    "a token that does not exist": (lambda e: e.open([49152]), "token id"),
    "a text message": (lambda e: e.send_message(mini.frame(mini.PING, 0), opcode=1), ""),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_violation_ends_only_its_sender(cloud, what):
    violate, word = VIOLATIONS[what]
    good, bad = MiniEdge(cloud, cloud.token), MiniEdge(cloud, cloud.token)
    violate(bad)
    assert word in said(bad)
    stream = good.open(IDS[:10])
    good.plan(stream, 1, (0, 10, 0))
    good.generate(stream, 2)
    assert len(good.reply(stream)[0]) == 2, "another connection does not notice"
    good.close()
    bad.close()


def test_window_is_kept(cloud):
    """Bulk beyond the credit cuts the connection off instead of filling memory: two unfinished messages together are larger than a stream's window."""
    edge = MiniEdge(cloud, cloud.token)
    stream, part = planned(edge), bytes(150_000)
    for i in range(26):
        edge.send(mini.KV_BLOCK, stream, mini.fields(1, 0, 0, 0, i * len(part), 4_000_000), part)
    with contextlib.suppress(Closed):  # it need not wait for the last byte
        for i in range(2):
            edge.send(mini.HIDDEN, stream, mini.fields(1, 0, 64, 2, 0, i * len(part), 4_000_000), part)
    assert "window" in said(edge)
    edge.close()


def test_who_does_not_greet_is_sent_away(cloud):
    edge = MiniEdge(cloud, cloud.token, hello=False)
    assert "no HELLO" in said(edge)
    edge.close()


def test_later_attempt_fences_the_earlier(cloud):
    edge, request = MiniEdge(cloud, cloud.token), bytes(range(16))
    first = edge.open(IDS, attempt=5, request_id=request)
    edge.expect(mini.OPEN_ACK, stream=first)
    edge.open(IDS, attempt=5, request_id=request)
    with pytest.raises(Closed, match="later attempt"):
        edge.expect(mini.OPEN_ACK)
    edge.close()


# ---- hostile HTTP ----


def https(cloud, data, seconds=3, answers=None):
    """What comes back for these bytes: all, until nothing has come for so long; or so many answers, however long they take."""
    raw = ssl.create_default_context(cafile=cloud.ca).wrap_socket(socket.create_connection(("127.0.0.1", cloud.port), timeout=600), server_hostname="localhost")
    answer = b""
    with raw:
        raw.sendall(data)
        raw.settimeout(600 if answers else seconds)
        try:
            while (answers is None or answer.count(b"HTTP/1.1 200") < answers) and (more := raw.recv(65536)):
                answer += more
        except OSError:
            pass
    return answer


@pytest.mark.parametrize("framing", ["GET {p} HTTP/1.1|Transfer-Encoding: chunked", "POST {p} HTTP/1.1|Transfer-Encoding: chunked",
                                     "DELETE {p}/x HTTP/1.1|Transfer-Encoding: chunked", "POST {p} HTTP/1.1|Transfer-Encoding: chunked|Content-Length: 0",
                                     "POST {p} HTTP/1.1|Content-Length: 0|Content-Length: 44"])
def test_no_request_hides_in_a_body(cloud, framing):
    """Where a body's end is unclear, nothing behind the head is taken for a request."""
    credential = f"Host: localhost\r\nAuthorization: Bearer {cloud.token}\r\n"
    hidden = f"GET /v1/models HTTP/1.1\r\n{credential}\r\n"
    control = https(cloud, (hidden * 2).encode(), answers=2)
    assert control.count(b"HTTP/1.1 200") == 2, "control: two requests in one flight are answered"
    line, *headers = framing.format(p="/v1/conversations").split("|")
    answer = https(cloud, (line + "\r\n" + credential + "".join(h + "\r\n" for h in headers) + "\r\n" + hidden).encode())
    assert answer.count(b"HTTP/1.1 ") <= 1 and b"HTTP/1.1 200" not in answer


# ---- a device that opens and sends nothing ----


def frames_until_pong(edge):
    """All that has come by the time that a PING is answered."""
    kinds = []
    edge.send(mini.PING, 0, mini.fields(77, False))
    while True:
        kind, _, header, _ = edge.receive()
        if kind == mini.PING and header.get(2):
            return kinds
        kinds.append(kind)


def test_who_sends_nothing_holds_nobody_up(tmp_path):
    """Many more streams than may run at once, planned and started, and no rows: a colleague's requests are answered meanwhile."""
    c = Cloud(tmp_path, extra=["--sequences", "4"])
    alice, bob = c.new_token("acme", "alice"), c.new_token("acme", "bob")
    c.start()
    try:
        edge = MiniEdge(c, alice)
        for _ in range(32):
            stream = planned(edge)
            edge.generate(stream, 6)
        frames_until_pong(edge)  # they are all open
        for i in range(2):
            assert completion(c, bob, f"{i} {TEXT}")[0]
        ended = {mini.TOKEN, mini.DONE, mini.ERROR}.intersection(frames_until_pong(edge))
        assert not ended, "those that send nothing still wait"
        for first in range(0, 100, BLOCK):  # and what the last of them sends after all is taken
            rows = min(BLOCK, 100 - first)
            edge.hidden(stream, 1, first, rows, EDGE_LAYERS, ROW * rows)
            for layer in range(EDGE_LAYERS):
                for is_value in (0, 1):
                    values = VALUES[: 2 * rows * Model.kv_heads * Model.head_dim]
                    edge.kv(stream, 1, first // BLOCK, layer, is_value, mini.piece(first // BLOCK, layer, is_value, values, count=rows))
        ids, done = edge.reply(stream)
        assert len(ids) == 6
        edge.close()
    finally:
        c.kill()


def test_who_asks_for_everything_leaves_room(tmp_path):
    """Five connections with sixty replies each are more than may run or wait, and none of them is read: another tenant comes in, and is not behind them all."""
    c = Cloud(tmp_path, extra=["--sequences", "4"])
    eve, bob = c.new_token("evil", "eve"), c.new_token("acme", "bob")
    c.start()
    try:
        edges = [MiniEdge(c, eve) for _ in range(5)]
        for edge in edges:
            for _ in range(60):
                stream = edge.open(IDS)
                edge.plan(stream, 1, (0, len(IDS), 0))
                edge.generate(stream, 300)
        assert wait_until(lambda: c.metrics()["tandem_requests_waiting"] > 150)
        for i in range(3):
            assert completion(c, bob, f"{i} {TEXT}")[0]
        assert c.metrics()["tandem_requests_waiting"] > 150, "control: they are still there"
        assert "overloaded" in said(edges[-1]), "who asks for more is told so"
        for edge in edges:
            edge.close()
    finally:
        c.kill()


# ---- a disk that is tampered with ----


@pytest.mark.parametrize("how", ["written into", "cut short"])
def test_a_model_file_changed_while_serving(tmp_path, how):
    """`cp other.gguf model.gguf` under a running node: nothing that came of it is answered or kept under the old model's name, and the node ends."""
    model = tmp_path / "m.gguf"
    shutil.copy(MODEL, model)
    c = Cloud(tmp_path / "c", model=model)
    token = c.new_token()
    c.start()
    try:
        truth, _ = completion(c, token, TEXT, cache=False)
        with open(model, "r+b", buffering=0) as f:
            if how == "cut short":
                f.truncate(1 << 20)
            else:  # every second MiB is another: rows of the embedding, for one
                for at in range(8 << 20, model.stat().st_size, 2 << 20):
                    f.seek(at)
                    f.write(bytes(1 << 20))
        with pytest.raises(httpx.HTTPError):
            completion(c, token, "Quite another story. " + TEXT)
        assert c.process.wait(600) > 0 and "was changed while it was in use" in c.log()
        shutil.copy(MODEL, model)
        c.start()
        text, cached = completion(c, token, "Quite another story. " + TEXT)
        assert cached == 0 and text == completion(c, token, "Quite another story. " + TEXT, cache=False)[0]
        assert completion(c, token, TEXT)[0] == truth
    finally:
        c.kill()


def test_index_cut_short_while_serving(tmp_path):
    """Any file of the index may shrink under a running node: it costs cached blocks at most."""
    c = Cloud(tmp_path)
    token = c.new_token()
    c.start()
    try:
        text, _ = completion(c, token, TEXT)
        files = list(c.store.glob("index*"))
        assert files
        for file in files:
            os.truncate(file, 0)
        for i in range(3):
            assert completion(c, token, TEXT)[0] == text
            completion(c, token, f"{i} {TEXT}")
        assert c.stop() == 0, c.log()[-2000:]
        c.start()
        assert completion(c, token, TEXT)[0] == text
    finally:
        c.kill()


def test_a_disk_that_hangs(tmp_path, preload):  # noqa: F811
    """Only what must be on it waits, and no longer than seconds: replies, look-ups, metrics and the operator's questions go on, and when it answers again all is
    well. A stop does not wait for it either; what was acknowledged is there afterwards."""
    c = Cloud(tmp_path / "c")
    token = c.new_token()
    e = Edge(tmp_path / "e", c, token, layers=0)
    programs = (c, e)
    try:
        for program in programs:
            program.faults = program.dir / "faults"
            program.hung = program.dir / "faults.hung"
            program.faults.write_text("")
            program.env.update(LD_PRELOAD=str(preload), TANDEM_DISK_FAULTS=str(program.faults))
            program.start()
            program.client = client_of(program, token, c.ca)

        def turn(program, text, conversation=None):
            """(its conversation, was it kept)"""
            told = program.client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=4,
                                                          extra_body={"conversation": conversation} if conversation else {}).model_extra
            return told["conversation"], told.get("conversation_kept", True)

        def hang(program):
            program.hung.unlink(missing_ok=True)
            program.faults.write_text("sync hang")

        def conversation(program):
            return program.client.get(f"/conversations/{program.kept}", cast_to=object)["id"]

        for program in programs:
            program.kept, kept = turn(program, TEXT)
            assert kept
            hang(program)
        with concurrent.futures.ThreadPoolExecutor() as pool:  # who is behind such a turn waits no longer than it
            turns = [pool.submit(turn, program, "And then? " + TEXT, program.kept) for program in programs]
            others = [pool.submit(turn, program, f"{i} " + TEXT) for program in programs for i in range(2)]
            for program, asked in zip(programs, turns):
                assert asked.result() == (program.kept, False), program.log()
            assert not any(asked.result()[1] for asked in others)
        for program in programs:
            assert program.hung.exists(), "control"
            assert program.log().count("the disk has not answered for") == 1, program.log()
            assert program.metrics()["tandem_store_writes_off"] == 1
            assert conversation(program) == program.kept
            with pytest.raises(openai.ConflictError, match="was not kept"):
                turn(program, "What else?", program.kept)
            with pytest.raises(openai.APIStatusError, match="timed out"):
                program.client.delete(f"/conversations/{program.kept}", cast_to=object)
        completion(c, token, TEXT)
        assert completion(c, token, TEXT)[1] > 0, "from memory"
        assert c.store_stat()["disk_answers"] is False
        for program in programs:
            program.faults.write_text("")
        for program in programs:
            assert wait_until(lambda p=program: p.log().count("the disk answers again") == 1), program.log()
            assert wait_until(lambda p=program: p.metrics()["tandem_store_writes_off"] == 0)
            assert turn(program, "What else? " + TEXT)[1]
            hang(program)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for program in programs:
                pool.submit(turn, program, "And now? " + TEXT)
            for program in programs:
                assert wait_until(program.hung.exists), program.log()
            for program in programs:
                program.process.terminate()
        for program in programs:
            assert program.process.wait(600) == 1 and "a disk does not answer" in program.log(), program.log()
            program.faults.write_text("")
            program.start()
            assert conversation(program) == program.kept
    finally:
        e.kill()
        c.kill()


# ---- files that are none ----


@pytest.mark.parametrize("what", ["fifo", "folder", "/dev/zero"])
@pytest.mark.parametrize("verb", [["conv", "import"], ["model", "inspect"]])
def test_what_is_no_file_is_refused(tmp_path, what, verb):
    path = {"fifo": tmp_path / "fifo", "folder": tmp_path}.get(what, what)
    if what == "fifo":
        os.mkfifo(path)
    r = subprocess.run([BIN / "tandem", *verb, path], capture_output=True, text=True, timeout=600)
    assert r.returncode == 1 and "not a regular file" in r.stderr and len(r.stderr.splitlines()) == 1, r.stderr
