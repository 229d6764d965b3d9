"""Personal data stays on the device; nothing readable lies in the cloud's store, index, logs or memory image. Each scan has a positive control."""
import json
import pathlib
import shutil
import signal
import struct
import subprocess

import pytest

from conftest import client_of
from harness import MODEL, Cloud, Edge, Relay, wait_until
from test_cli import tandem
from test_faults import Redis

EMAIL, PHONE, CARD, IBAN = "marta.quill@example.org", "+44 20 7946 0958", "4539 1488 0343 6467", "DE89370400440532013000"


def files_of(directory):
    return [p for p in pathlib.Path(directory).rglob("*") if p.is_file()]


def found(needles, blob):
    return [n for n in needles if n in blob]


@pytest.fixture
def plain_world(tmp_path):
    """The link without TLS through a recording relay: what a packet would show if TLS did not hide it."""
    c = Cloud(tmp_path / "c", extra=[])
    token = c.new_token()
    c.command = lambda base=c.command: [x for x in plain(base())]
    c.start()
    relay = Relay(c.port, record=True)
    e = Edge(tmp_path / "e", c, token, 8, extra=["--plain"], cloud_port=relay.port).start()
    yield c, e, relay
    e.kill()
    c.kill()


def plain(command):
    skip = False
    for part in map(str, command):
        if skip:
            skip = False
        elif part in ("--cert", "--key"):
            skip = True
        else:
            yield part
    yield "--plain"


def test_personal_data_stays(plain_world, tmp_path):
    c, e, relay = plain_world
    r = client_of(e).chat.completions.create(
        model="default", temperature=0, max_tokens=40,
        messages=[{"role": "user", "content": f"Repeat exactly: my e-mail is {EMAIL} and my card is {CARD}, IBAN {IBAN}, phone {PHONE}."}])
    reply = r.choices[0].message.content
    secrets = [s.encode() for s in (EMAIL, PHONE, CARD, IBAN)]
    assert b"tandem.v1" in relay.recorded, "control: the record sees the link"
    assert b"tandem-edge/" in relay.sent(), "control: and what HELLO says in it"
    assert found(secrets, relay.sent() + bytes(relay.recorded)) == []
    for path in files_of(tmp_path / "c") + [e.log_path]:
        assert found(secrets, path.read_bytes()) == [], path
    for path in files_of(tmp_path / "e"):
        assert found(secrets, path.read_bytes()) == [], path
    print(reply)


IMAGE_MAPPING_MAX = 1 << 30  # the KV pages are larger; they hold neither text nor ids


def memory_image(pid):
    """Every writable mapping of a process."""
    image = bytearray()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            span, mode = line.split()[:2]
            begin, end = (int(x, 16) for x in span.split("-"))
            if not mode.startswith("rw") or end - begin > IMAGE_MAPPING_MAX:
                continue
            try:
                mem.seek(begin)
                image += mem.read(end - begin)
            except OSError:
                pass
    return bytes(image)


def image_at_once(process):
    """The same while it stands still: taking it may last longer than a reply."""
    process.send_signal(signal.SIGSTOP)
    try:
        return memory_image(process.pid)
    finally:
        process.send_signal(signal.SIGCONT)


def token_ids(client, cloud, token, text):
    reply = client._client.post(cloud.url + "/tokenize", json={"content": text}, headers={"Authorization": f"Bearer {token}"})
    return reply.json()["tokens"]


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def all_of(redis):
    """Every key and value of the server."""
    def cli(*words):
        return subprocess.run(["redis-cli", "-p", str(redis.port), "--raw", *words], capture_output=True, check=True).stdout
    keys = cli("KEYS", "*").split()
    return b"".join([k + b"\n" + cli("GET", k.decode()) for k in keys]), len(keys)


def exported(c, directory):
    """The conversation and its blocks in a file, read from a store at rest."""
    words, bundle = directory / "words", directory / "bundle"
    words.write_text("words for the way\n")
    words.chmod(0o600)
    sent = json.loads(tandem("store", "export", bundle, "--tenant", "acme", "--principal", "alice", "--model", MODEL, "--transfer-key-file", words,
                             "--store", c.store, "--store-key-file", c.dir / "store.key", "--json").stdout)
    assert sent["conversations"] == 1 and sent["blocks"] >= 1
    return bundle


def test_store_holds_no_prompt(tmp_path):
    redis = Redis() if shutil.which("redis-server") else None
    c = Cloud(tmp_path / "c", extra=["--redis", f"127.0.0.1:{redis.port}"] if redis else [])
    token = c.new_token()
    if redis:
        redis.start()
    c.start()
    try:
        text = "Zephyrine quokkas juggle marzipan obelisks beneath seventeen vermilion archways. " * 6
        client = client_of(c, token, c.ca)
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=80)
        ids = token_ids(client, c, token, text)[4:24]
        needles = [text[:40].encode(), struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(ids)}H", *ids), str(ids)[1:-1].encode(),
                   str(ids)[1:-1].replace(" ", "").encode(), b"".join(map(varint, ids))]
        control = needles[0] + needles[1] + needles[-1]
        assert found([needles[0], needles[1], needles[-1]], control) == [needles[0], needles[1], needles[-1]]
        if redis:
            assert wait_until(lambda: all_of(redis)[1] >= 2), "control: it was written there"
            assert found(needles, all_of(redis)[0]) == []
        wal = c.store / "index.sqlite-wal"
        assert wait_until(lambda: wal.exists() and wal.stat().st_size > 0), "control: the index is written"
        for path in files_of(tmp_path / "c"):
            assert found(needles, path.read_bytes()) == [], path
        assert c.stop() == 0
        for path in [*files_of(tmp_path / "c"), exported(c, tmp_path)]:
            assert found(needles, path.read_bytes()) == [], path
    finally:
        c.kill()
        if redis:
            redis.kill()


def test_memory_forgets_the_prompt(tmp_path):
    """While it answers, a node must know the prompt: the control. Afterwards its memory image holds neither its text nor its ids."""
    c = Cloud(tmp_path / "c", extra=["--kv-memory", "64M"])
    token = c.new_token()
    c.start()
    try:
        text = "Umbrageous walruses catalogue cerulean harpsichords beside eleven gossamer lighthouses. " * 4
        client = client_of(c, token, c.ca)
        ids = token_ids(client, c, token, text)[4:20]
        needles = [text[20:60].encode(), struct.pack(f"<{len(ids)}I", *ids)]
        stream = client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=200,
                                                stream=True, extra_body={"ignore_eos": True})
        next(stream), next(stream)
        assert found(needles, image_at_once(c.process)), "control: a running request is in memory"
        for _ in stream:
            pass
        client.close()
        assert wait_until(lambda: found(needles, memory_image(c.process.pid)) == [])
    finally:
        c.kill()
