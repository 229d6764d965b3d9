"""The tandem command: chat, conversations, slices, the store; and an edge that holds a slice only."""
import contextlib
import json
import os
import pathlib
import pty
import re
import resource
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest

from conftest import client_of
from harness import BIN, MODEL, ROOT, WAIT_SECONDS, Cloud, Edge, wait_until

ENV = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}  # TANDEM_MODEL would be a setting


def tandem(*arguments, stdin="", code=0, **how):
    r = subprocess.run([BIN / "tandem", *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=600, env=ENV, **how)
    assert r.returncode == code, r.stdout + r.stderr
    return r


def files_stay_small():
    """As `ulimit -f` in a shell; Python ignores the signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))


def test_chat_saves_and_resumes(edge, tmp_path):
    transcript = tmp_path / "talk.txt"
    r = tandem("chat", "--url", edge.url, "--seed", 1, "--max-tokens", 16, stdin=f"Name a river.\n/id\n/save {transcript}\nAnd another?\n/exit\n")
    conversation = re.search(r"conv-[0-9a-f]+", r.stderr).group(0)
    assert "> Name a river." in transcript.read_text() and conversation in r.stderr
    shown = json.loads(tandem("conv", "show", conversation, "--url", edge.url, "--json").stdout)
    before = shown["tokens"]
    tandem("chat", "--url", edge.url, "--conversation", conversation, "--max-tokens", 8, "Thank you.")
    assert json.loads(tandem("conv", "show", conversation, "--url", edge.url, "--json").stdout)["tokens"] > before
    assert conversation in tandem("conv", "ls", "--url", edge.url).stdout
    tandem("conv", "rm", conversation, "--url", edge.url)
    assert conversation not in tandem("conv", "ls", "--url", edge.url).stdout
    assert len(tandem("conv", "show", conversation, "--url", edge.url, code=1).stderr.strip().splitlines()) == 1
    for option in ("--conversation", "--model"):  # what cannot be sent is not left out
        assert "UTF-8" in tandem("chat", "--url", edge.url, option, os.fsdecode(b"\xff"), "--max-tokens", 1, "Hi.", code=1).stderr


def resident_bytes(program):
    status = pathlib.Path(f"/proc/{program.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


def test_slice_is_enough_for_an_edge(cloud, edge, tmp_path):
    device = tmp_path / "device.gguf"
    tandem("model", "slice", "--layers", "0:8", MODEL, device)
    whole, part = (json.loads(tandem("model", "fingerprint", f, "--json").stdout)["fingerprint"] for f in (MODEL, device))
    assert whole == part
    assert device.stat().st_size < 0.6 * os.stat(MODEL).st_size
    tandem("model", "verify", device)
    made = device.stat().st_mtime_ns
    assert "--force" in tandem("model", "slice", "--layers", "0:4", MODEL, device, code=1).stderr and device.stat().st_mtime_ns == made
    assert json.loads(tandem("model", "slice", "--layers", "0:8", "--force", MODEL, device, "--json").stdout) == {
        "file": str(device), "layers": 8, "bytes": device.stat().st_size}
    ask = dict(model="default", messages=[{"role": "user", "content": "What do bees do in winter? " * 12}], temperature=0, max_tokens=16,
               extra_body={"cache": False, "fidelity": "exact"})
    reference = client_of(cloud, cloud.token, cloud.ca).chat.completions.create(**ask).choices[0].message.content
    everything = Edge(tmp_path / "all", cloud, cloud.new_token(principal="whole"), 30, extra=["--codec", "l0", "--hidden", "f32"]).start()
    client_of(everything).chat.completions.create(**ask)
    whole_bytes = resident_bytes(everything)
    assert everything.stop() == 0
    e = Edge(tmp_path / "e", cloud, cloud.new_token(principal="sliced"), 8, model=str(device), extra=["--codec", "l0", "--hidden", "f32"]).start()
    try:
        r = client_of(e).chat.completions.create(**{**ask, "extra_body": {**ask["extra_body"], "timings": True}})
        assert r.choices[0].message.content == reference
        assert r.timings["edge_layers"] == 8 and r.timings["edge_prefill_tokens"] > 0
        print(f"in memory: {resident_bytes(e) >> 20} MiB with 8 layers, {whole_bytes >> 20} with all 30")
        assert resident_bytes(e) < 0.7 * whole_bytes, (resident_bytes(e), whole_bytes)
    finally:
        assert e.stop() == 0


def test_chat_explains_the_plan(cloud, edge, tmp_path):
    text = "Tell me about rivers. " * 40
    chosen = Edge(tmp_path / "e", cloud, cloud.token, "auto").start()
    try:
        said = tandem("chat", "--url", chosen.url, "--explain", "--temperature", "0", "--max-tokens", "20", text).stderr
        for part in ("[plan:", "[estimates: first token", "the cloud alone:", "uplink", "[what happened:"):
            assert part in said, said
        assert re.search(r"what happened: first token \d+ ms, 16th [1-9]\d* ms", said), said
    finally:
        assert chosen.stop() == 0
    said = tandem("chat", "--url", edge.url, "--explain", "--max-tokens", "4", "Of lakes. " + text).stderr
    assert "[plan: 8 layers here" in said and " sent in l1, rows in f16; the number of layers was given" in said and "[estimates" not in said
    assert "16th" not in said and re.search(r"; 1 plan, ", said) and "1 plans" not in said, said  # there was no sixteenth token
    assert "; 1 token; uplink" in tandem("chat", "--url", edge.url, "--stats", "--max-tokens", "1", "Hi.").stderr


def test_store_is_listed_and_verified(tmp_path):
    c = Cloud(tmp_path)
    token = c.new_token()
    c.start()
    client_of(c, token, c.ca).chat.completions.create(model="default", messages=[{"role": "user", "content": "One two three. " * 60}], max_tokens=4)
    at = ("--store", c.store, "--store-key-file", tmp_path / "store.key", "--json")
    assert len(tandem("store", "ls", *at, code=1).stderr.strip().splitlines()) == 1  # a node holds it
    c.stop()
    listing = json.loads(tandem("store", "ls", *at).stdout)
    assert listing["blocks"] >= 2 and listing["conversations"] == 1 and listing["tenants"][0]["tenant"] == "acme"
    verified = json.loads(tandem("store", "verify", *at).stdout)
    assert verified["bad"] == 0 and verified["records"] > listing["blocks"]


def lines(r):
    return r.stderr.strip().splitlines()


COUNTING = [{"role": "user", "content": "One two three. " * 60}]


def stored(tmp_path, name="a", **settings):
    """A node, stopped, whose store holds one conversation of a few blocks; its id and text."""
    c = Cloud(tmp_path / name, **settings)
    c.token = c.new_token()
    c.start()
    r = ask(c, COUNTING, conversation="counting")
    c.settle((r.usage.total_tokens - 1) // 64)
    return c


def ask(c, messages, **extra):
    return client_of(c, c.token, c.ca).chat.completions.create(model="default", messages=messages, max_tokens=8, temperature=0,
                                                              extra_body={"timings": True, **extra})


def test_store_is_looked_after(tmp_path):
    c = stored(tmp_path)
    key = tmp_path / "a/store.key"
    at = ("--store", c.store, "--store-key-file", key, "--json")
    online = ("--admin", f"http://127.0.0.1:{c.admin_port}", "--store-key-file", key, "--json")
    # A node holds the directory: one clear line that says who can be asked; and it can.
    refused = lines(tandem("store", "compact", *at, code=1))
    assert len(refused) == 1 and "--admin http://127.0.0.1:PORT" in refused[0] and "--admin-port" in refused[0]  # it cannot know the port
    assert "--admin" not in lines(tandem("store", "rotate-key", *at, code=1))[0]
    running = json.loads(tandem("store", "stat", *online).stdout)
    assert running["blocks"] >= 2 and running["conversations"] == 1 and running["pins"] == 0
    assert json.loads(tandem("store", "compact", *online).stdout)["freed_bytes"] >= 0
    assert json.loads(tandem("store", "gc", *online).stdout)["blocks"] == 0
    mine = ("counting", "--tenant", "acme", "--principal", "alice")
    assert json.loads(tandem("store", "pin", *mine, *online).stdout)["pinned"]
    assert json.loads(tandem("store", "stat", *online).stdout)["pins"] == 1
    assert "no such conversation" in tandem("store", "pin", "nothing", *mine[1:], *online, code=1).stderr
    tandem("store", "rebuild", *online, code=2)
    assert "this machine" in tandem("store", "stat", "--admin", "http://127.0.0.1.example.org", *online[2:], code=2).stderr
    # Not without the key that belongs to the store, and not from a web page.
    other = tmp_path / "other.key"
    other.write_text("00" * 32)
    other.chmod(0o600)
    assert "token" in tandem("store", "stat", "--admin", online[1], "--store-key-file", other, code=1).stderr
    for headers, status in (({}, 401), ({"Host": "example.org"}, 403), ({"Origin": "http://example.org"}, 403)):
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(urllib.request.Request(online[1] + "/store/stat", headers=headers))
            assert False, headers
        except urllib.error.HTTPError as e:
            assert e.code == status, headers
    tandem("store", "unpin", *mine, *online)
    api = ("--url", c.url, "--ca", c.ca, "--key-file", tmp_path / "api.key")
    (tmp_path / "api.key").write_text(c.token)
    (tmp_path / "api.key").chmod(0o600)
    tandem("conv", "pin", "counting", *api)  # with its KV
    assert json.loads(tandem("store", "stat", *online).stdout)["pins"] == 1 + running["blocks"]
    listed = tandem("conv", "ls", *api).stdout.splitlines()
    assert listed[0].split() == ["id", "updated", "tokens", "pinned", "title"] and listed[1].split()[4] == "yes", listed
    tandem("conv", "unpin", "counting", *api)
    assert [x["pinned"] for x in json.loads(tandem("conv", "ls", *api, "--json").stdout)["data"]] == [False]
    assert json.loads(tandem("store", "stat", *online).stdout)["pins"] == 0
    tandem("store", "pin", *mine, *online)
    c.stop()
    # The directory itself.
    stopped = json.loads(tandem("store", "stat", *at).stdout)
    assert all(stopped[k] == running[k] for k in ("blocks", "block_bytes", "conversations", "tenants")) and stopped["pins"] == 1
    tandem("store", "unpin", *mine, *at)
    assert json.loads(tandem("store", "stat", *at).stdout)["pins"] == 0
    for f in c.store.glob("index*"):
        f.unlink()
    assert json.loads(tandem("store", "rebuild", *at).stdout)["records"] >= stopped["blocks"] + 1
    assert json.loads(tandem("store", "compact", "--dead-percent", 0, *at).stdout)["freed_bytes"] >= 0
    assert json.loads(tandem("store", "gc", *at).stdout)["blocks"] == 0
    assert "blocks let go" in tandem("store", "gc", *at[:-1]).stdout
    # A new master key: the old one opens nothing any more, the node goes on with what it had.
    before = key.read_text()
    (tmp_path / "before.key").write_text(before)
    (tmp_path / "before.key").chmod(0o600)
    tandem("store", "rotate-key", *at)
    assert key.read_text() != before and key.stat().st_mode & 0o777 == 0o600
    assert len(lines(tandem("store", "stat", "--store", c.store, "--store-key-file", tmp_path / "before.key", code=1))) == 1
    assert json.loads(tandem("store", "verify", *at).stdout)["bad"] == 0
    c.comes_back(lambda: (ask(c, COUNTING).usage.prompt_tokens_details.cached_tokens,), 64)
    r = ask(c, [{"role": "user", "content": "Go on."}], conversation="counting")
    assert r.usage.prompt_tokens_details.cached_tokens > 0
    assert c.stop() == 0


def pages(store):
    """The 4 KiB pages that the log holds, but for empty ones."""
    found = set()
    for f in store.glob("seg-*"):
        data = f.read_bytes()
        found |= {data[i:i + 4096] for i in range(0, len(data), 4096)}
    return found - {bytes(4096)}


def test_a_tenant_is_erased(tmp_path):
    c = stored(tmp_path)
    key, question = c.dir / "store.key", [{"role": "user", "content": "Go on."}]
    other = client_of(c, c.new_token(tenant="other", principal="eve"), c.ca)
    online = ("--admin", f"http://127.0.0.1:{c.admin_port}", "--store-key-file", key, "--json")
    at = ("--store", c.store, "--store-key-file", key, "--json")
    before = pages(c.store)  # all of acme's
    their = dict(model="default", messages=[{"role": "user", "content": "Three two one. " * 60}], temperature=0, max_tokens=8)
    text = other.chat.completions.create(**their, extra_body={"conversation": "theirs"}).choices[0].message.content
    assert ask(c, question, conversation="counting").usage.prompt_tokens_details.cached_tokens > 0, "control"
    assert "--yes" in tandem("store", "erase-tenant", "acme", *online, code=2).stderr
    assert "no tenant" in tandem("store", "erase-tenant", "nobody", "--yes", *online, code=1).stderr
    tandem("store", "erase-tenant", "--yes", *online, code=2)
    assert {t["tenant"] for t in json.loads(tandem("store", "ls", *online).stdout)["tenants"]} == {"acme", "other"}

    def nothing_left(conversations):
        listing = json.loads(tandem("store", "ls", *(online if c.process.poll() is None else at)).stdout)
        assert [t["tenant"] for t in listing["tenants"]] == ["other"] and listing["conversations"] == conversations
        assert len(before & pages(c.store)) <= len(list(c.store.glob("seg-*"))), "sealed bytes are gone, but for the segments' heads"

    def their_reply():
        r = other.chat.completions.create(**their)
        return r.choices[0].message.content, r.usage.prompt_tokens_details.cached_tokens

    def others_are_there(kept):
        """Their blocks are in memory or read, if too late to be of use where the machine is busy, and nothing is written anew: they are there."""
        reads = c.store_stat()["reads"]
        said, cached = their_reply()
        c.settle()
        now = c.store_stat()
        assert said == text and (cached > 0 or now["reads"] > reads)
        assert now["blocks"] == kept > 0 and now["read_failures"] == now["damaged"] == 0
        assert other.get("/conversations/theirs", cast_to=object)["id"] == "theirs"

    keys = (c.store / "keys.td").read_bytes()
    assert json.loads(tandem("store", "erase-tenant", "acme", "--yes", *online).stdout) == {"erased": "acme"}
    nothing_left(1)
    c.settle()
    kept = c.stored()
    others_are_there(kept)  # and is a conversation more
    c.stop()
    (c.store / "keys.td").write_bytes(keys)  # an old copy of the keys comes back: the tombstone stands
    nothing_left(2)
    c.comes_back(their_reply, 64)
    others_are_there(kept)
    assert len(before & pages(c.store)) <= len(list(c.store.glob("seg-*")))
    # Who is still let in begins anew; nothing is known of before.
    fresh = client_of(c, c.token, c.ca)
    r = fresh.chat.completions.create(model="default", messages=[{"role": "user", "content": "One two three. " * 60}], temperature=0, max_tokens=8)
    assert r.usage.prompt_tokens_details.cached_tokens == 0
    assert [x["id"] for x in fresh.get("/conversations", cast_to=object)["data"]] != ["counting"]
    # And on the directory of a node that is stopped.
    c.stop()
    assert "--yes" in tandem("store", "erase-tenant", "acme", *at, code=2).stderr
    tandem("store", "erase-tenant", "acme", "--yes", *at)
    assert "no such tenant" in tandem("store", "erase-tenant", "acme", "--yes", *at, code=1).stderr
    assert [t["tenant"] for t in json.loads(tandem("store", "ls", *at).stdout)["tenants"]] == ["other"]
    assert json.loads(tandem("store", "verify", *at).stdout)["bad"] == 0


def test_a_tenant_is_erased_in_mid_traffic(tmp_path):
    """Edge and direct clients of the tenant go on all the while; what they began before the erase ends, and nothing of it is written afterwards."""
    c = Cloud(tmp_path / "c")
    edge_token, direct_token, eve_token = c.new_token(principal="dev"), c.new_token(principal="app"), c.new_token(tenant="other", principal="eve")
    c.start()
    e = Edge(tmp_path / "e", c, edge_token).start()
    key = c.dir / "store.key"
    online = ("--admin", f"http://127.0.0.1:{c.admin_port}", "--store-key-file", key, "--json")
    told, stop, failures = [], threading.Event(), []  # told: whose turn, which, how it ended, and whether it was begun after the erase
    erased = threading.Event()

    def talk(client, name, tenant_is_erased):
        """One turn after the other, each on a conversation of its own; an erase may end one, and then the next is good again."""
        turn = 0
        while not stop.is_set():
            turn, late = turn + 1, erased.is_set()
            try:
                with client.chat.completions.create(
                        model="default", temperature=0, max_tokens=60, stream=True, extra_body={"conversation": f"{name}-{turn}", "ignore_eos": True},
                        messages=[{"role": "user", "content": f"{name} {turn}: tell me about the sea and the ships. " * 8}]) as r:
                    for _ in r:
                        pass
                told.append((name, turn, "ok", late))
            except openai.APIError as error:
                told.append((name, turn, str(error), late))
                if not tenant_is_erased:
                    failures.append(f"{name}: {error}")
                time.sleep(0.1)

    clients = [(client_of(e), "edge", True), (client_of(c, direct_token, c.ca), "direct", True), (client_of(c, eve_token, c.ca), "other", False)]
    threads = [threading.Thread(target=talk, args=x) for x in clients]
    for t in threads:
        t.start()

    def wait_for(names, count, late=False):
        """Each has had so many good turns."""
        assert wait_until(lambda: min(sum(1 for t in list(told) if t[0] == n and t[2] == "ok" and t[3] >= late) for n in names) >= count), told

    def listed():
        return json.loads(tandem("store", "ls", *online).stdout)

    try:
        wait_for(("edge", "direct", "other"), 2)
        before = pages(c.store)
        assert {t["tenant"] for t in listed()["tenants"]} == {"acme", "other"}, "control"
        mark = len(told)
        assert json.loads(tandem("store", "erase-tenant", "acme", "--yes", *online).stdout) == {"erased": "acme"}
        erased.set()
        wait_for(("edge", "direct"), 1, late=True)  # the edge has greeted again by itself
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert failures == []
    assert any("erased" in t[2] for t in told[mark:]), "control: something was under way"
    # Turns that were begun before the erase are nowhere; those that came after it are all there.
    app = client_of(c, direct_token, c.ca)
    kept = {x["id"] for x in app.get("/conversations", cast_to=object)["data"]}
    late = {f"direct-{t[1]}" for t in told if t[0] == "direct" and t[2] == "ok" and t[3]}
    assert late and late <= kept and not kept & {f"direct-{t[1]}" for t in told[:mark] if t[0] == "direct"}
    e.stop()
    c.stop()
    # Every sealed page of before that is still there is the other tenant's: erase it, too, and only the segments' heads are left.
    at = ("--store", c.store, "--store-key-file", key, "--json")
    assert len(before & pages(c.store)) > len(list(c.store.glob("seg-*"))), "control: the other tenant's pages"
    tandem("store", "erase-tenant", "other", "--yes", *at)
    assert len(before & pages(c.store)) <= len(list(c.store.glob("seg-*")))
    assert json.loads(tandem("store", "verify", *at).stdout)["bad"] == 0



def test_progress_of_a_running_node(tmp_path):
    """Long work at a node whose disk is slow: a bar on a terminal, lines of JSON with --json; the answer alone is on stdout."""
    library, rate = tmp_path / "slow_disk.so", tmp_path / "rate"
    subprocess.run(["cc", "-std=c17", "-O2", "-shared", "-fPIC", "-o", library, ROOT / "tests/bench/slow_disk.c", "-ldl"], check=True)
    rate.write_text("0")
    c = Cloud(tmp_path / "c")
    c.env.update(LD_PRELOAD=str(library), TANDEM_SLOW_DISK=str(rate))
    c.token = c.new_token()
    c.start()
    ask(c, [{"role": "user", "content": "One two three. " * 60}])
    online = ("--admin", f"http://127.0.0.1:{c.admin_port}", "--store-key-file", c.dir / "store.key")
    c.settle(2)
    blocks = c.stored()

    def verify(*options, stderr, shown, is_under_way):
        """The program, which meets a slow disk until it has shown that it is in the middle of its work, and what it showed."""
        rate.write_text("1000000")  # a second a block, and some more
        p = subprocess.Popen([BIN / "tandem", "store", "verify", *map(str, online), *options], stdout=subprocess.PIPE, stderr=stderr, env=ENV, text=True)
        seen = b""
        while not is_under_way(seen) and (more := os.read(shown if shown is not None else p.stderr.fileno(), 1 << 16)):
            seen += more
        rate.write_text("0")
        return p, seen.decode()

    p, seen = verify("--json", stderr=subprocess.PIPE, shown=None, is_under_way=lambda seen: re.search(rb'"done": [1-9]\d*, "total": \d+}\n', seen))
    said, rest = p.communicate(timeout=WAIT_SECONDS)
    answer, lines = json.loads(said), [json.loads(x) for x in (seen + rest).splitlines()]
    assert answer["bad"] == 0 and answer["records"] > blocks
    assert lines[-1] == {"done": answer["records"], "total": answer["records"]} and any(0 < x["done"] < answer["records"] for x in lines)
    assert [x["done"] for x in lines] == sorted({x["done"] for x in lines})
    terminal, theirs = pty.openpty()
    p, bar = verify(stderr=theirs, shown=terminal, is_under_way=lambda seen: re.search(rb" [1-9]\d? %", seen))
    os.close(theirs)
    said, _ = p.communicate(timeout=WAIT_SECONDS)
    with contextlib.suppress(OSError):  # the other side is closed
        while more := os.read(terminal, 1 << 16).decode():
            bar += more
    os.close(terminal)
    assert p.returncode == 0 and "0 damaged" in said
    assert re.search(r"verifying \[#* +\] +[1-9]\d? %", bar) and bar.rstrip().endswith("100 %")
    assert "freed_bytes" in tandem("store", "compact", *online, "--json").stdout
    assert c.stop() == 0


def test_store_moves_to_a_node_with_other_keys(tmp_path):
    a = stored(tmp_path)
    words = tmp_path / "words"
    words.write_text("words for the way\n")
    words.chmod(0o600)
    a.stop()
    whose = ("--tenant", "acme", "--principal", "alice", "--model", MODEL, "--transfer-key-file", words)
    at_a = ("--store", a.store, "--store-key-file", tmp_path / "a/store.key")
    bundle = tmp_path / "bundle"
    sent = json.loads(tandem("store", "export", bundle, *whose, *at_a, "--json").stdout)
    assert sent["conversations"] == 1 and sent["blocks"] >= 2
    assert b"One two" not in bundle.read_bytes() and bundle.stat().st_mode & 0o777 == 0o600
    a.start()
    question = [{"role": "user", "content": "Go on."}]
    reference = ask(a, question, conversation="counting", fidelity="exact")
    assert reference.usage.prompt_tokens_details.cached_tokens > 0
    assert a.stop() == 0
    b = Cloud(tmp_path / "b")  # with keys of its own
    b.token, stranger = b.new_token(), b.new_token(tenant="other")
    b.start()
    assert b.stop() == 0
    at_b = ("--store", b.store, "--store-key-file", tmp_path / "b/store.key")
    for wrong, word in ((("--tenant", "other"), "another tenant"), (("--principal", "bob"), "another principal")):
        assert word in lines(tandem("store", "import", bundle, "--transfer-key-file", words, *wrong, *at_b, code=1))[0]
    assert "--trusted" in tandem("store", "--help").stdout
    untrusted = Cloud(tmp_path / "u")  # who does not vouch for the file: the same for its owner, and for nobody else
    untrusted.token, colleague = untrusted.new_token(), untrusted.new_token(principal="bob")
    untrusted.start()
    assert untrusted.stop() == 0
    tandem("store", "import", bundle, "--transfer-key-file", words, "--store", untrusted.store, "--store-key-file", tmp_path / "u/store.key")
    untrusted.start()
    # First: before anything has been computed what is stored is read in any case; later what would be read too slowly is computed.
    r = ask(untrusted, question, conversation="counting", fidelity="exact")
    assert r.choices[0].message.content == reference.choices[0].message.content
    assert r.usage.prompt_tokens_details.cached_tokens == reference.usage.prompt_tokens_details.cached_tokens
    r = client_of(untrusted, colleague, untrusted.ca).chat.completions.create(model="default", messages=[{"role": "user", "content": "One two three. " * 60}],
                                                                              max_tokens=4)
    assert r.usage.prompt_tokens_details.cached_tokens == 0
    assert untrusted.stop() == 0
    got = json.loads(tandem("store", "import", bundle, "--trusted", "--transfer-key-file", words, *at_b, "--json").stdout)
    assert got == {**sent, "kept": 0}
    assert json.loads(tandem("store", "import", bundle, "--trusted", "--transfer-key-file", words, *at_b, "--json").stdout)["kept"] == 1
    listing = json.loads(tandem("store", "stat", *at_b, "--json").stdout)
    assert listing["blocks"] == sent["blocks"] and listing["tenants"][0]["from_device"] == 0
    b.start()
    r = ask(b, question, conversation="counting", fidelity="exact")
    assert r.choices[0].message.content == reference.choices[0].message.content
    assert r.usage.prompt_tokens_details.cached_tokens == reference.usage.prompt_tokens_details.cached_tokens
    other = client_of(b, stranger, b.ca).chat.completions.create(model="default", messages=[{"role": "user", "content": "One two three. " * 60}], max_tokens=4)
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert b.stop() == 0


def test_conversations_are_copied(cloud, edge, tmp_path):
    words = tmp_path / "words"
    words.write_text("a long line of words that nobody guesses\n")
    words.chmod(0o600)
    client = client_of(edge)
    question = "I am called Ada; write to ada@example.org. " * 8
    said = client.chat.completions.create(model="default", messages=[{"role": "user", "content": question}], max_tokens=8, temperature=0,
                                          extra_body={"conversation": "original"}).choices[0].message.content
    at = ("--url", edge.url)
    shown = tandem("conv", "show", "original", *at).stdout
    assert f"user: {question}" in shown and f"assistant: {said}" in shown and "<|im_" not in shown
    fork = tandem("conv", "fork", "original", *at).stdout.strip()
    assert fork != "original" and tandem("conv", "show", fork, *at).stdout == shown

    def resume(conversation):
        return client.chat.completions.create(model="default", messages=[{"role": "user", "content": "What is my name?"}], max_tokens=8, temperature=0, seed=1,
                                              extra_body={"conversation": conversation})

    for path, how in ((tmp_path / "sealed", ("--export-key-file", words)), (tmp_path / "clear", ("--plain",))):
        tandem("conv", "export", "original", path, *how, *at)
        assert path.stat().st_mode & 0o777 == 0o600
        assert (b"Ada" in path.read_bytes()) == (how == ("--plain",)) and (b'"tokens"' in path.read_bytes()) == (how == ("--plain",))
    assert len(lines(tandem("conv", "export", "original", tmp_path / "sealed", "--export-key-file", words, *at, code=1))) == 1  # it is there already
    tandem("conv", "export", "original", tmp_path / "third", *at, code=2)  # neither sealed nor said to be plain
    for how in (("--export-key-file", words), ("--plain",)):  # what cannot be written whole is not there at all
        r = tandem("conv", "export", "original", tmp_path / "third", *how, *at, code=1, preexec_fn=files_stay_small)
        assert "third: File too large" in lines(r)[0] and not list(tmp_path.glob("third*"))
    a = resume("original")
    assert a.usage.prompt_tokens_details.cached_tokens > 0
    b = resume(fork)  # the same text, from the same KV
    assert (b.choices[0].message.content, b.usage.prompt_tokens) == (a.choices[0].message.content, a.usage.prompt_tokens)
    assert b.usage.prompt_tokens_details.cached_tokens >= a.usage.prompt_tokens_details.cached_tokens
    tandem("conv", "rm", "original", *at)
    assert tandem("conv", "import", tmp_path / "sealed", "--export-key-file", words, *at).stdout.strip() == "original"
    assert tandem("conv", "show", "original", *at).stdout == shown  # the vault has travelled, too
    second = tandem("conv", "import", tmp_path / "clear", *at).stdout.strip()
    assert second not in ("original", fork)
    for c in ("original", second):
        again = resume(c)
        assert (again.choices[0].message.content, again.usage.prompt_tokens) == (a.choices[0].message.content, a.usage.prompt_tokens)
    # Its values stay on the device; other words do not open it; a cut or changed file is no conversation.
    assert "agent" in tandem("conv", "import", tmp_path / "clear", "--url", cloud.url, "--ca", cloud.ca, code=1).stderr
    words.write_text("other words\n")
    assert "words" in tandem("conv", "import", tmp_path / "sealed", "--export-key-file", words, *at, code=1).stderr
    assert "sealed" in tandem("conv", "import", tmp_path / "sealed", *at, code=1).stderr
    data = json.loads((tmp_path / "clear").read_text())
    for name, change in (("tokenizer", {"tokenizer": "00" * 32}), ("exported", {"format": "x"}), ("damaged", {"tokens": [10 ** 6]}), ("damaged", {"turns": []})):
        (tmp_path / "bad").write_text(json.dumps({**data, **change}))
        assert name in lines(tandem("conv", "import", tmp_path / "bad", *at, code=1))[0]
    tandem("conv", "pin", "original", *at)
    tandem("conv", "unpin", "original", *at)
    for verb in ("show", "rm", "fork", "pin", "unpin"):
        assert lines(tandem("conv", verb, "conv-nowhere", *at, code=1)) == ["tandem conv: there is no such conversation: conv-nowhere"]
    assert "no such" in tandem("conv", "export", "conv-nowhere", tmp_path / "none", "--plain", *at, code=1).stderr


def test_an_imported_conversation_is_recognised(cloud, edge, tmp_path):
    """By a client that knows of no conversations and re-sends what was said, at a node and at an agent."""
    key = tmp_path / "key"
    key.write_text(cloud.new_token(principal="heir"))
    key.chmod(0o600)
    there = (("--url", cloud.url, "--ca", cloud.ca, "--key-file", key), client_of(cloud, key.read_text(), cloud.ca))
    question = [{"role": "user", "content": "Tell me about rivers in spring. " * 12}]
    for at, client in (there, (("--url", edge.url), client_of(edge))):
        first = client.chat.completions.create(model="default", messages=question, max_tokens=8, temperature=0, extra_body={"conversation": "mine"})
        tandem("conv", "export", "mine", tmp_path / "file", "--plain", *at)
        tandem("conv", "rm", "mine", *at)
        history = [*question, {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And in autumn?"}]
        assert tandem("conv", "import", tmp_path / "file", *at).stdout.strip() == "mine"
        r = client.chat.completions.with_raw_response.create(model="default", messages=history, max_tokens=4, temperature=0)
        assert r.headers["x-conversation-id"] == "mine"
        assert r.parse().usage.prompt_tokens_details.cached_tokens > 0
        tandem("conv", "rm", "mine", *at)
        (tmp_path / "file").unlink()


def test_usage():
    """Who gives too little is shown every form and an example that can be run, not a line of it."""
    for command, forms in ((("model",), ("inspect FILE", "fingerprint FILE", "verify FILE", "slice --layers 0:K IN OUT")),
                           (("model", "inspect"), ("inspect FILE",)), (("model", "burn", "x"), ("inspect FILE",)),
                           (("bench",), ("engine --model FILE", "codec --model FILE --text FILE...", "store --store DIR", "trace FILE...")),
                           (("bench", "store"), ("store --store DIR",)), (("bench", "codec"), ("--text FILE",)), (("bench", "trace"), ("FILE...",)),
                           (("conv",), ("ls", "show ID", "export ID FILE")), (("store",), ("rebuild|rotate-key --store DIR",))):
        r = tandem(*command, code=2)
        usage = r.stderr.find(f"Usage: tandem {command[0]} ")
        assert r.stdout == "" and usage >= 0, r.stderr
        assert all(form in r.stderr for form in forms) and re.search(rf"\n  tandem {command[0]} .*\w", r.stderr), r.stderr
        assert re.search(rf"tandem {command[0]}.* --help tells more", r.stderr)
        wrong = "no command is given" if len(command) == 1 else f"'{command[1]}' takes other arguments" if command[1] != "burn" else "there is no command 'burn'"
        assert command[0] == "bench" or r.stderr.startswith(f"tandem {command[0]}: {wrong}\n"), r.stderr
    assert tandem(code=2).stderr.startswith("tandem: no command is given\n")
    verbs = tandem("--help").stdout
    for command in ("conv", "store"):
        assert re.search(rf"^  {command} .*\| unpin \|", verbs, re.MULTILINE), verbs


def test_an_admin_listener_that_hangs_up_is_named_so(tmp_path):
    """As that of a node which is stopping; the option there is --admin, and it has no TLS."""
    key = tmp_path / "key"
    key.write_text("00" * 32)
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        p = subprocess.Popen([BIN / "tandem", "store", "stat", "--admin", f"http://127.0.0.1:{server.getsockname()[1]}", "--store-key-file", key],
                             stderr=subprocess.PIPE, text=True, env=ENV)
        connection, _ = server.accept()
        connection.recv(1 << 16)  # else closing would reset
        connection.close()
        said = p.communicate(timeout=WAIT_SECONDS)[1]
    assert p.returncode == 1 and "--admin" in said and "--url" not in said and "TLS" not in said, said


def test_posts_without_a_body(edge):
    """As `curl -X POST` sends them: neither a body nor a type of it."""
    r = json.loads(tandem("chat", "--url", edge.url, "--json", "--max-tokens", 2, "Hi.").stdout)
    forked = subprocess.run(["curl", "-s", "--noproxy", "*", "-X", "POST", f"{edge.url}/v1/conversations/{r['conversation']}/fork"], capture_output=True, text=True)
    assert json.loads(forked.stdout)["forked_from"] == r["conversation"], forked.stdout
    nothing = subprocess.run(["curl", "-s", "--noproxy", "*", "-d", "{}", f"{edge.url}/v1/nothing"], capture_output=True, text=True)  # of a form's type
    assert json.loads(nothing.stdout)["error"]["code"] == "not_found", nothing.stdout


def test_bench(tmp_path):
    r = json.loads(tandem("bench", "engine", "--model", MODEL, "--threads", 2, "--prompt", 64, "--gen", 4, "--repeat", 1, "--json").stdout)
    assert r["prefill_tps"] > 0 and r["decode_tps"] > 0


def test_chat_says_what_it_waits_for():
    """An agent keeps a request while its cloud is away, and its /health says why: so does the chat, on stderr, and once."""
    def answer(connection, status, body):
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        p = subprocess.Popen([BIN / "tandem", "chat", "--url", f"http://127.0.0.1:{server.getsockname()[1]}", "Hi."],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
        asked, _ = server.accept()
        asked.recv(1 << 16)  # else closing would reset
        health, _ = server.accept()
        assert health.recv(1 << 16).startswith(b"GET /health ")
        answer(health, "503 Service Unavailable", json.dumps({"error": {"message": "no link to the cloud: nobody is there"}}))
        assert p.stderr.readline() == "waiting: no link to the cloud: nobody is there\n"
        answer(asked, "200 OK", 'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\ndata: [DONE]\n\n')
        assert p.communicate() == ("Hello\n", "") and p.returncode == 0


def test_chat_asks_nothing_once_the_stream_has_begun():
    """Also where its head names no conversation, as where it began with a keep-alive; until then a server that is well may be asked again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        p = subprocess.Popen([BIN / "tandem", "chat", "--url", f"http://127.0.0.1:{server.getsockname()[1]}", "Hi."],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
        asked, _ = server.accept()
        asked.recv(1 << 16)
        health, _ = server.accept()
        health.recv(1 << 16)
        asked.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n: keep-alive\n\n")
        health.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        health.close()
        for word in "one", "two":
            asked.sendall(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % word.encode())
            assert p.stdout.read(3) == word
        asked.close()
        assert p.communicate() == ("\n", "") and p.returncode == 0
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_bench_refuses_what_is_wrong_usage():
    for wrong, says in ((("--model", MODEL, "--device", "tpu"), "--device tpu: want cpu, cuda or cuda:N"), (("--model", MODEL, "--isa", "foo"), "--isa foo: "),
                        (("--shape", "llama-7b"), "shapes are llama-8b, tiny"), (("--model", MODEL, "--prompt", 900000), "900064 tokens wanted"),
                        (("--model", MODEL, "--shape", "tiny"), "--model and --shape: "), (("--model", MODEL, "--dtype", "f16"), "--dtype is of random weights")):
        r = tandem("bench", "engine", *wrong, code=2)
        assert r.stdout == "" and says in r.stderr and len(lines(r)) == 1, r.stderr
    assert "instead of a file: llama-8b, tiny" in " ".join(tandem("bench", "--help").stdout.split())


def test_bench_says_what_it_does():
    """A bar on a terminal, a line of each part elsewhere, and nothing beside JSON; the table says which ceiling a fraction is of."""
    command = ("bench", "engine", "--shape", "tiny", "--dtype", "q8_0", "--prompt", 32, "--gen", 2, "--repeat", 1)
    r = tandem(*command)
    assert r.stderr == "making random weights\nmeasuring\n" and "of peak" in r.stdout
    assert tandem(*command, "--json").stderr == ""
    terminal, stderr = pty.openpty()
    subprocess.run([BIN / "tandem", *map(str, command)], stderr=stderr, stdout=subprocess.DEVNULL, env={**ENV, "TERM": "xterm"}, check=True, timeout=600)
    os.close(stderr)
    shown = ""
    with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as read:  # an error is its end
        while data := read.read(65536):
            shown += data.decode()
    assert re.search(r"making random weights \[#{40}\] 100 %\s.*measuring \[#{40}\] 100 %", shown, re.DOTALL), shown


def test_chat_says_on_a_terminal_that_it_waits():
    """A stream that does not begin is shown to be waited for, and the line goes when it does. The server is silent until it was."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid, terminal = pty.fork()
        if pid == 0:
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            os.execve(BIN / "tandem", ["tandem", "chat", "--url", url, "Hi."], {**ENV, "TERM": "xterm"})
        connection, _ = server.accept()
        connection.recv(1 << 16)  # else closing would reset
        shown = b""
        while b"waiting for the first token" not in shown:
            shown += os.read(terminal, 1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
                           b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\ndata: [DONE]\n\n')
        connection.close()
        while b"Hello" not in shown:
            shown += os.read(terminal, 1000)
        assert b"\r\x1b[KHello" in shown
        assert os.waitpid(pid, 0)[1] == 0
        os.close(terminal)
