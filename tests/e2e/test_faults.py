"""What goes wrong under a node that serves: the disk, its files, the index, the shared server. Through all of it replies are the undisturbed ones, metrics and one line of the
log say what is wrong, and when the fault goes the tier is back by itself."""
import collections
import contextlib
import itertools
import random
import shutil
import socket
import sqlite3
import subprocess
import threading

import openai
import pytest

from conftest import client_of
from harness import ROOT, Cloud, Edge, free_port, wait_until

SMALL = ["--store-ram", "0", "--pages", "9", "--context", "512"]  # what was asked before the last prompt is on the disk alone
PROMPTS = range(1, 17)


def prompt(number):
    return [{"role": "user", "content": f"Here is story {number}. " + " ".join(f"On day {i} the fox went {i * number % 37} steps to the well." for i in range(20))}]


class Node:
    def __init__(self, path, extra=(), env=(), **settings):
        self.cloud = Cloud(path, extra=[*SMALL, *extra], **settings)
        self.cloud.env.update(env)
        self.token = self.cloud.new_token()
        self.cloud.start()
        self.client = client_of(self.cloud, self.token, self.cloud.ca)
        self.blocks = {}  # whole ones of each prompt and its reply

    def ask(self, number):
        """(text, tokens that were cached)"""
        r = self.client.chat.completions.create(model="default", messages=prompt(number), temperature=0, max_tokens=12,
                                                extra_body={"fidelity": "exact", "ignore_eos": True})
        self.blocks[number] = (r.usage.total_tokens - 1) // 64
        return r.choices[0].message.content, r.usage.prompt_tokens_details.cached_tokens

    def ask_where(self, number):
        """(text, tokens that were cached, of these in memory, read from the disk)"""
        r = self.client.chat.completions.create(model="default", messages=prompt(number), temperature=0, max_tokens=12,
                                                extra_body={"fidelity": "exact", "ignore_eos": True, "timings": True})
        t = r.model_extra["timings"]
        return r.choices[0].message.content, r.usage.prompt_tokens_details.cached_tokens, t["cached_memory_tokens"], t["cached_disk_tokens"]

    def metric(self, name):
        return self.cloud.metrics().get(name, 0)

    def told(self, text):
        return self.cloud.log().count(text)

    def comes_true(self, condition):
        assert wait_until(condition), self.cloud.log()[-3000:]


@contextlib.contextmanager
def node(path, **settings):
    n = Node(path, **settings)
    try:
        yield n
        assert n.cloud.process.poll() is None, n.cloud.log()[-2000:]
        assert n.cloud.stop() == 0, n.cloud.log()[-2000:]
    finally:
        n.cloud.kill()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The undisturbed replies."""
    with node(tmp_path_factory.mktemp("undisturbed")) as n:
        yield collections.defaultdict(lambda: None, {i: n.ask(i)[0] for i in PROMPTS})


BLOCKS = 'tandem_kv_tier_blocks{tier="disk"}'


def fill(n, texts):
    """Two prompts on the disk, of which the first is nowhere else."""
    for i in (1, 2):
        assert n.ask(i)[0] == texts[i]
    n.cloud.settle()


def reads(n, texts, number=1):
    """Does this prompt come from the disk? What is late is computed instead, so it may take another try."""
    for _ in range(10):
        text, cached = n.ask(number)
        assert text == texts[number]
        if cached >= 256:
            return True
        for i in (7, 8):
            n.ask(i)
    return False


def is_kept(n, texts, number):
    """Asked for the first time, a prompt is on the disk soon, all of it, and there behind a kill."""
    n.cloud.settle()
    before = n.cloud.stored()
    assert n.ask(number)[0] == texts[number]
    n.cloud.settle(before + n.blocks[number])
    assert n.cloud.comes_back(lambda: n.ask(number), 256)[0] == texts[number]


# ---- the disk fails ----

@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("there is no compiler to make disk_faults.so with")
    library = tmp_path_factory.mktemp("preload") / "disk_faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, ROOT / "tests/e2e/disk_faults.c", "-ldl"], check=True)
    return library


def test_reads_that_fail(tmp_path, texts, preload):
    faults = tmp_path / "faults"
    faults.write_text("")
    with node(tmp_path / "c", env={"LD_PRELOAD": str(preload), "TANDEM_DISK_FAULTS": str(faults)}) as n:
        fill(n, texts)
        assert reads(n, texts), "control: from the disk"
        fill(n, texts)
        faults.write_text("read short")  # a short read is asked again for the rest
        assert reads(n, texts)
        fill(n, texts)
        faults.write_text("read eio")
        text, cached, in_memory, on_disk = n.ask_where(1)
        assert text == texts[1] and on_disk == 0 and cached == in_memory, "found on the disk, and computed"
        n.comes_true(lambda: n.metric('tandem_kv_tier_damaged_total{tier="disk"}') > 0 and n.told("is damaged or cannot be read"))
        assert n.told("is damaged or cannot be read") == 1
        faults.write_text("")
        fill(n, texts)
        assert reads(n, texts), "it was written again, and the disk reads"
        assert n.told("is damaged or cannot be read") == 1


def test_reads_that_hang(tmp_path, texts, preload):
    faults = tmp_path / "faults"
    faults.write_text("")
    with node(tmp_path / "c", env={"LD_PRELOAD": str(preload), "TANDEM_DISK_FAULTS": str(faults)}) as n:
        fill(n, texts)
        assert reads(n, texts), "control"
        fill(n, texts)
        faults.write_text("read slow")
        assert n.ask(1)[0] == texts[1]
        assert n.ask(4)[0] == texts[4]
        n.comes_true(lambda: n.metric('tandem_kv_tier_timeouts_total{tier="disk"}') > 0 and n.told("the disk tier does not answer"))
        assert n.told("the disk tier does not answer") == 1
        faults.write_text("")
        n.comes_true(lambda: n.metric('tandem_kv_tier_sick{tier="disk"}') == 0 and n.told("the disk tier answers again") == 1)
        fill(n, texts)
        assert reads(n, texts)


@pytest.mark.parametrize("fault", ["write eio", "write enospc", "sync eio"])
def test_writes_that_fail(tmp_path, texts, preload, fault):
    faults = tmp_path / "faults"
    faults.write_text("")
    with node(tmp_path / "c", env={"LD_PRELOAD": str(preload), "TANDEM_DISK_FAULTS": str(faults)}) as n:
        fill(n, texts)
        faults.write_text(fault)
        for i in (3, 4):
            assert n.ask(i)[0] == texts[i]
        n.comes_true(lambda: n.metric("tandem_store_writes_off") == 1)
        assert n.told("writes are off") == 1
        assert reads(n, texts), "what is there is still read"
        faults.write_text("")
        n.comes_true(lambda: n.ask(5)[0] == texts[5] and n.metric("tandem_store_writes_off") == 0)
        assert n.told("writes are on again") == 1
        is_kept(n, texts, 6)


def test_a_disk_that_others_fill(tmp_path, texts):
    """A real file system without room, taken by somebody else's file, so that letting blocks go helps nobody."""
    mount = tmp_path / "full"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", mount], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        with node(tmp_path / "c", store=mount / "store") as n:
            fill(n, texts)
            with open(mount / "other", "wb", buffering=0) as other:
                for first in (3, 5):  # the second time what the store has let go is taken, too
                    with contextlib.suppress(OSError):
                        while other.write(bytes(1 << 16)):
                            pass
                    for i in (first, first + 1):
                        assert n.ask(i)[0] == texts[i]
            (mount / "other").unlink()
            n.comes_true(lambda: n.ask(9)[0] == texts[9] and n.metric("tandem_store_writes_off") == 0)
            off, on = n.told("writes are off"), n.told("writes are on again")
            assert off == on <= 6, "a line for each change, not for each block"
            is_kept(n, texts, 10)
    finally:
        subprocess.run(["umount", "-l", mount])


def fill_up(path):
    with open(path, "ab", buffering=0) as other:
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while other.write(bytes(size)):
                    pass


@pytest.mark.parametrize("where", ["edge", "cloud"])
def test_a_turn_that_a_full_disk_loses_is_told(tmp_path, where):
    """Its reply says so, by the id alone the conversation does not go on without it, and with its history it does."""
    mount = tmp_path / "full"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", mount], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    cloud = Cloud(tmp_path / "c", extra=SMALL, store=mount / "store" if where == "cloud" else None)
    token = cloud.new_token()
    programs = [cloud.start()]
    try:
        if where == "edge":
            (tmp_path / "e").mkdir()
            (tmp_path / "e" / "data").symlink_to(mount)
            programs.append(Edge(tmp_path / "e", cloud, token, layers=0).start())
        client = client_of(programs[-1], token, cloud.ca)

        def ask(messages, conversation=None, stream=False):
            extra = {"ignore_eos": True} | ({"conversation": conversation} if conversation else {})
            r = client.chat.completions.with_raw_response.create(model="default", messages=messages, temperature=0, max_tokens=4, stream=stream, extra_body=extra)
            if not stream:
                body = r.parse()
                told = body.model_extra.get("conversation_kept", True)
                assert (r.headers.get("x-conversation-kept") == "false") == (not told)
                return r.headers["x-conversation-id"], body.choices[0].message.content, told
            chunks = list(r.parse())
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            return r.headers["x-conversation-id"], text, chunks[-1].model_extra.get("conversation_kept", True)

        history = [{"role": "user", "content": "I am called Ada." + 40 * " It rains."}]
        conversation, text, kept = ask(history)
        assert kept
        for turn in range(30):  # what the store lets go for a turn is taken as well
            fill_up(mount / "other")
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Say {turn}."}]
            same, text, kept = ask(history[-1:], conversation, stream=turn % 2 == 1)
            assert same == conversation and text
            if not kept:
                break
        assert not kept and (turn > 0 or where == "edge"), "what may go has gone first"
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "What am I called?"}]
        (mount / "other").unlink()
        for stream in (False, True):
            with pytest.raises(openai.ConflictError, match="was not kept: it holds"):
                ask(history[-1:], conversation, stream)
        again, text, kept = ask(history, conversation, stream=True)  # a fork, where turns were added by the id alone
        assert kept and text
        shown = client.get(f"/conversations/{again}", cast_to=object)
        assert [m["role"] for m in shown["messages"]].count("user") == len(history) // 2 + 1, "each turn once"
        assert ask([{"role": "user", "content": "And I?"}], again)[0] == again
        with pytest.raises(openai.NotFoundError, match="there is no conversation"):
            ask(history[-1:], "conv-" + 24 * "0")
    finally:
        for p in reversed(programs):
            p.kill()
        subprocess.run(["umount", "-l", mount])


# ---- its files are damaged while they are in use ----

def overwrite(path, change):
    """In place: the program has the file open."""
    with open(path, "r+b") as f:
        data = bytearray(f.read())
        change(data)
        f.seek(0)
        f.write(data)
        f.truncate()


def flip(data):
    rng = random.Random(3)
    for at in range(4096 + 100, len(data), 4096):  # each page but the segment's head
        data[at + rng.randrange(3000)] ^= 1 << rng.randrange(8)


def swap(data):
    middle = len(data) // 8192 * 4096
    data[4096:middle], data[middle:2 * middle - 4096] = data[middle:2 * middle - 4096], data[4096:middle]


@pytest.mark.parametrize("how", ["flip", "truncate", "swap", "delete"])
def test_segments_damaged_while_serving(tmp_path, texts, how):
    with node(tmp_path / "c") as n:
        fill(n, texts)
        assert reads(n, texts), "control: from the disk"
        fill(n, texts)
        for segment in n.cloud.store.glob("seg-*"):
            if how == "delete":
                segment.unlink()
            elif how == "truncate":
                with open(segment, "r+b") as f:
                    f.truncate(20000)
            else:
                overwrite(segment, flip if how == "flip" else swap)
        for i in (1, 2, 3):
            assert n.ask(i)[0] == texts[i]
        if how != "delete":  # an open file stays readable without its name
            n.comes_true(lambda: n.metric('tandem_kv_tier_damaged_total{tier="disk"}') > 0 and n.told("is damaged or cannot be read"))
            assert n.told("is damaged or cannot be read") == 1
        for i in (1, 2, 3):
            assert n.ask(i)[0] == texts[i]
        assert reads(n, texts), "written again, and read"
        n.cloud.kill()
        n.cloud.start()
        for i in (1, 2, 3):
            assert n.ask(i)[0] == texts[i]


@pytest.mark.parametrize("how", ["garbage", "delete", "truncate"])
def test_index_damaged_while_serving(tmp_path, texts, how):
    with node(tmp_path / "c") as n:
        fill(n, texts)
        wal = n.cloud.store / "index.sqlite-wal"
        n.comes_true(lambda: wal.exists() and wal.stat().st_size > 0)
        before = n.cloud.stored()
        for f in n.cloud.store.glob("index.sqlite*"):
            if how == "delete":
                f.unlink()
            elif how == "truncate":
                overwrite(f, lambda data: data.__delitem__(slice(5000, None)))
            else:
                overwrite(f, lambda data: data.__setitem__(slice(0, len(data)), b"garbage!" * (len(data) // 8)))
        for i in (3, 4, 1):
            assert n.ask(i)[0] == texts[i]
        n.cloud.settle(before + n.blocks[3] + n.blocks[4])
        assert n.cloud.comes_back(lambda: n.ask(3), 256)[0] == texts[3], "the segments alone are enough"


def test_index_locked_while_serving(tmp_path, texts):
    with node(tmp_path / "c") as n:
        fill(n, texts)
        assert n.cloud.stop() == 0
        index = n.cloud.store / "index.sqlite"
        other = sqlite3.connect(index, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        n.cloud.start()
        for i in (1, 3, 4):
            assert n.ask(i)[0] == texts[i]
        assert n.metric("tandem_store_index_behind") == 1 and n.told("another program has locked it") == 1
        assert reads(n, texts, 3)
        other.rollback()
        other.close()
        n.comes_true(lambda: n.metric("tandem_store_index_behind") == 0)
        assert n.told("there is an index again") == 1 and n.told("another program has locked it") == 1
        n.cloud.settle()
        blocks = n.cloud.stored()
        assert n.cloud.stop() == 0
        with contextlib.closing(sqlite3.connect(index)) as read:
            assert read.execute("SELECT count(*) FROM records WHERE type = 1").fetchone()[0] == blocks
        n.cloud.start()


# ---- the shared server ----

class Redis:
    def __init__(self):
        self.port, self.process = free_port(), None

    def start(self):
        self.process = subprocess.Popen(["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"],
                                        stdout=subprocess.DEVNULL)
        assert wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.process:
            self.process.kill()
            self.process.wait()
        self.process = None


class Nonsense:
    """A server on that port that answers every command, PING too, with something else than what was asked."""
    ANSWERS = [b"-ERR no\r\n", b"$5\r\nhello\r\n", b"*2\r\n$-1\r\n:7\r\n", b"\x00\xff\xfe\r\n", b"*1000000000\r\n", b"$999999999\r\nx", b":1\r\n", b"+PONG"]

    def __init__(self, port):
        self.listener, self.leave, self.random = socket.create_server(("127.0.0.1", port)), False, random.Random(5)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while not self.leave:
            with contextlib.suppress(OSError):
                client, _ = self.listener.accept()
                threading.Thread(target=self.talk, args=(client,), daemon=True).start()

    def talk(self, client):
        with contextlib.suppress(OSError), client:
            while not self.leave and client.recv(65536):
                client.sendall(self.random.choice(self.ANSWERS))

    def close(self):
        self.leave = True
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def size_of(port):
    return int(subprocess.run(["redis-cli", "-p", str(port), "dbsize"], capture_output=True, text=True, check=True).stdout)


def reads_one_of(n, texts, prompts, name):
    """A prompt comes from the store. Of those before it, nothing or a part may: where reading was slow a moment ago, computing is preferred, and what was slow is tried again."""
    found = []
    for number in itertools.islice(prompts, 5):
        text, cached = n.ask(number)
        assert text == texts[number], name
        if cached >= 256:
            return
        found.append(cached)
    remote = {m: v for m, v in n.cloud.metrics().items() if "remote" in m or "load" in m or "declined" in m}
    pytest.fail(f"{name}: read {found}, {remote}")


SICK, AWAY, BACK = 'tandem_kv_tier_sick{tier="remote"}', "the remote tier is away", "the remote tier is back"


def test_the_shared_server_fails(tmp_path, texts):
    if not shutil.which("redis-server"):
        pytest.skip("there is no redis-server here")
    import signal
    redis = Redis()
    redis.start()
    shared = ["--redis", f"127.0.0.1:{redis.port}", "--store-keys", str(tmp_path / "keys")]
    try:
        with node(tmp_path / "a", extra=shared) as a:
            for i in PROMPTS:
                assert a.ask(i)[0] == texts[i]
            a.comes_true(lambda: size_of(redis.port) >= 2 * a.metric(BLOCKS) > 0)  # written behind
            (tmp_path / "b").mkdir()
            shutil.copy(tmp_path / "a/store.key", tmp_path / "b/store.key")
            with node(tmp_path / "b", extra=shared) as b:
                b.comes_true(lambda: b.metric(SICK) == 0)
                next_prompt, lines = iter(PROMPTS), b.told(AWAY)
                reads_one_of(b, texts, next_prompt, "control: from the other node")

                def during(name):
                    number = next(next_prompt)
                    assert b.ask(number)[0] == texts[number], name
                    b.comes_true(lambda: b.metric(SICK) == 1)
                    assert b.told(AWAY) == lines + 1, name

                def after(name):
                    b.comes_true(lambda: b.metric(SICK) == 0)
                    assert b.told(AWAY) == lines + 1 and b.told(BACK) > lines, name
                    return lines + 1

                redis.signal(signal.SIGSTOP)
                during("hung")
                redis.signal(signal.SIGCONT)
                lines = after("hung")
                reads_one_of(b, texts, next_prompt, "hung")
                port = redis.port
                redis.kill()
                false = Nonsense(port)
                during("nonsense")
                false.close()
                during_killed = b.told(AWAY)
                assert during_killed == lines + 1, "one line, however long it lasts"
                number = next(next_prompt)
                assert b.ask(number)[0] == texts[number], "killed"
                redis.start()  # empty
                after("restarted empty")
                number = next(next_prompt)
                assert b.ask(number) == (texts[number], 0)
                before = size_of(port)
                number = next(next_prompt)
                assert b.ask(number)[0] == texts[number]
                b.comes_true(lambda: size_of(port) > before)
    finally:
        redis.kill()
