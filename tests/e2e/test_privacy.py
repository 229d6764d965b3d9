"""Personal data stays on the device; nothing readable lies in the cloud's store, index, logs or memory image. Each scan has a positive control."""
import pathlib
import struct
import subprocess

import pytest

from conftest import client_of
from harness import Cloud, Edge, Relay

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
    assert found(secrets, bytes(relay.recorded)) == []
    for path in files_of(tmp_path / "c") + [e.log_path]:
        assert found(secrets, path.read_bytes()) == [], path
    for path in files_of(tmp_path / "e"):
        assert found(secrets, path.read_bytes()) == [], path
    print(reply)


def memory_image(pid):
    """Every readable, writable mapping of a process."""
    image = bytearray()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            span, mode = line.split()[:2]
            if not mode.startswith("rw"):
                continue
            begin, end = (int(x, 16) for x in span.split("-"))
            try:
                mem.seek(begin)
                image += mem.read(end - begin)
            except OSError:
                pass
    return bytes(image)


def test_store_and_memory_hold_no_prompt(tmp_path):
    c = Cloud(tmp_path / "c")
    token = c.new_token()
    c.start()
    try:
        text = "Zephyrine quokkas juggle marzipan obelisks beneath seventeen vermilion archways. " * 6
        client = client_of(c, token, c.ca)
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=80)
        ids = client._client.post(c.url + "/tokenize", json={"content": text}, headers={"Authorization": f"Bearer {token}"}).json()["tokens"][4:24]
        needles = [text[:40].encode(), struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(ids)}H", *ids), str(ids)[1:-1].encode(),
                   str(ids)[1:-1].replace(" ", "").encode()]
        control = needles[0] + needles[1]
        assert found(needles[:2], control) == needles[:2]
        c.stop()
        for path in files_of(tmp_path / "c"):
            assert found(needles, path.read_bytes()) == [], path
    finally:
        c.kill()


def test_idle_memory_holds_no_prompt(tmp_path):
    c = Cloud(tmp_path / "c")
    token = c.new_token()
    c.start()
    try:
        text = "Umbrageous walruses catalogue cerulean harpsichords beside eleven gossamer lighthouses. " * 4
        client = client_of(c, token, c.ca)
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=8,
                                       extra_headers={"Connection": "close"})
        client.close()
        image = memory_image(c.process.pid)
        assert b"tandem" in image, "control: the image is readable"
        assert text[:60].encode() not in image
    finally:
        c.kill()
