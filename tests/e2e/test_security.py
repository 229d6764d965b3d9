"""Who may come in, and what a damaged store does."""
import pathlib
import random
import shutil
import struct
import subprocess

import openai
import pytest

from conftest import client_of
from harness import MODEL, ROOT, WAIT_SECONDS, Cloud, Edge, wait_until

HELLO = [{"role": "user", "content": "Hello. " * 80}]


def complaints(program):
    return [line for line in program.log().split("\n")[:-1] if " WARN " in line or " ERROR " in line]


def edge_error(tmp_path, cloud, token, **more):
    """Start an edge that cannot come in; return what it says."""
    e = Edge(tmp_path, cloud, token, **more)
    e.start(wait=False)
    wait_until(lambda: complaints(e) or e.process.poll() is not None)
    e.kill()
    return (complaints(e) or [e.log()])[-1]


def test_wrong_token(tmp_path, cloud):
    said = edge_error(tmp_path, cloud, "0" * 64)
    assert "token" in said or "credential" in said, said
    assert "0" * 64 not in said


def test_untrusted_certificate(tmp_path, cloud):
    other = Cloud(tmp_path / "other", authority="its own")
    e = Edge(tmp_path / "e", cloud, cloud.token)
    e.cloud = other
    e.cloud_port = cloud.port
    e.start(wait=False)
    told = wait_until(lambda: "certificate" in e.log())
    e.kill()
    assert told, e.log()


def test_expired_certificate(tmp_path):
    """The node says so when it starts, the device when it tries: since when, and what to do; and that helps."""
    c = Cloud(tmp_path / "c")
    subprocess.run([ROOT / "tests/dated_certs.sh", c.certs], check=True, capture_output=True)
    shutil.copy(c.certs / "dates/expired.crt", c.certs / "server.crt")
    e = Edge(tmp_path / "e", c, c.new_token())

    try:
        c.start()
        assert "expired on 2021-02-03 04:05 UTC" in c.log() and "deploy/certs.sh" in c.log(), c.log()
        e.start(wait=False)
        assert wait_until(lambda: any("expired on 2021-02-03 04:05 UTC" in line and "deploy/certs.sh" in line for line in complaints(e))), e.log()
        c.stop()
        subprocess.run([ROOT / "deploy/certs.sh", c.certs], check=True, capture_output=True)
        c.start()
        assert wait_until(lambda: "connected to" in e.log()), e.log()
    finally:
        e.kill()
        c.kill()


def test_wrong_model(tmp_path, cloud):
    tiny = pathlib.Path(__file__).resolve().parents[1] / "golden/tiny/llama-gqa.gguf"
    if not tiny.exists():
        tiny = sorted(tiny.parent.glob("*.gguf"))[0]
    said = edge_error(tmp_path, cloud, cloud.token, model=str(tiny), layers=1)
    assert "fingerprint" in said or "model" in said, said


def test_other_tenant_sees_nothing(tmp_path):
    c = Cloud(tmp_path)
    alice, bob, eve = c.new_token("acme", "alice"), c.new_token("acme", "bob"), c.new_token("evil", "eve")
    c.start()
    try:
        ask = dict(model="default", messages=HELLO, temperature=0, max_tokens=4)
        r = client_of(c, alice, c.ca).chat.completions.with_raw_response.create(**ask)
        conversation = r.headers["x-conversation-id"]
        usage = [client_of(c, t, c.ca).chat.completions.create(**ask).usage.prompt_tokens_details.cached_tokens for t in (alice, bob, eve)]
        assert usage[0] >= 64, "control: the same principal hits"
        assert usage[1] >= 64, "same tenant, computed by the cloud from ids: shared"
        assert usage[2] == 0, "another tenant never hits"
        mine = client_of(c, alice, c.ca).get(f"/conversations/{conversation}", cast_to=object)
        assert mine["id"] == conversation, "control: its owner sees it"
        for token in (bob, eve):
            with pytest.raises(openai.NotFoundError):
                client_of(c, token, c.ca).get(f"/conversations/{conversation}", cast_to=object)
    finally:
        c.kill()


def exchanged(model, old, new):
    """The same file with one thing in it replaced, which must be there once."""
    assert model.count(old) == 1 and len(old) == len(new), old
    return model.replace(old, new)


def with_other_weights(model):
    return model[:-4096] + bytes(b ^ 1 for b in model[-4096:])


def with_other_rope(model):
    head = b"llama.rope.freq_base" + struct.pack("<I", 6)
    at = model.index(head) + len(head)
    return model[:at] + struct.pack("<f", struct.unpack("<f", model[at:at + 4])[0] / 2) + model[at + 4:]


def with_other_tokens(model):
    """Two words of the vocabulary change places."""
    one, two, aside = (struct.pack("<Q", 7) + w for w in ("ĠWales".encode(), "ĠJapan".encode(), b"\0" * 7))
    return exchanged(exchanged(exchanged(model, one, aside), two, one), aside, two)


def test_another_model_of_the_same_shape_sees_nothing(tmp_path):
    model, path = pathlib.Path(MODEL).read_bytes(), tmp_path / "model.gguf"
    c = Cloud(tmp_path / "c", model=path)
    token = c.new_token()

    def cached_by(content):
        path.write_bytes(content)
        c.start()
        ask = dict(model="default", messages=HELLO, temperature=0, max_tokens=4)
        hits = [client_of(c, token, c.ca).chat.completions.create(**ask).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
        assert c.stop() == 0
        assert hits[1] >= 64, "control: its own"
        return hits[0]

    try:
        assert cached_by(model) == 0
        for other in (with_other_weights, with_other_rope, with_other_tokens):
            assert cached_by(other(model)) == 0, other.__name__
        assert cached_by(model) >= 64, "control: the first one's are there"
    finally:
        c.kill()


def damage(path, how, rng):
    data = bytearray(path.read_bytes())
    if how == "flip":
        for _ in range(200):
            data[rng.randrange(8192, len(data))] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del data[len(data) // 2:]
    elif how == "swap":
        a, b = 8192, len(data) // 8192 * 4096
        data[a:a + 4096], data[b:b + 4096] = data[b:b + 4096], data[a:a + 4096]
    elif how == "delete":
        path.unlink()
        return
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "truncate", "swap", "delete", "index"])
def test_damaged_store_is_a_miss(tmp_path, how):
    c = Cloud(tmp_path)
    token = c.new_token()
    c.start()
    ask = dict(model="default", messages=[{"role": "user", "content": "The tide comes in and the tide goes out. " * 40}], temperature=0, max_tokens=24,
               extra_body={"fidelity": "exact"})
    try:
        text = client_of(c, token, c.ca).chat.completions.create(**ask).choices[0].message.content
        c.stop()
        if how == "index":
            next(c.store.glob("index.sqlite")).write_bytes(b"SQLite format 3\0" + b"garbage" * 5000)
        else:
            for segment in c.store.glob("seg-*"):
                damage(segment, how, random.Random(3))
        c.start()
        r = client_of(c, token, c.ca).chat.completions.create(**ask)
        assert r.choices[0].message.content == text
        if how == "index":
            assert r.usage.prompt_tokens_details.cached_tokens >= 64, "the segments alone are enough"
    finally:
        c.kill()


def s_client(port, *arguments):
    return subprocess.run(["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *arguments], input=b"GET /health HTTP/1.0\r\n\r\n", capture_output=True, timeout=WAIT_SECONDS)


def test_client_certificates(tmp_path):
    c = Cloud(tmp_path)
    c.extra = ["--client-ca", str(c.certs / "ca.crt")]
    c.new_token()
    c.start()
    try:
        good = ["-cert", str(c.certs / "client-tester.crt"), "-key", str(c.certs / "client-tester.key"), "-CAfile", c.ca]
        assert b"HTTP/1." in s_client(c.port, *good, "-servername", "localhost", "-ign_eof").stdout, "control: a good certificate comes in"
        for arguments in (["-noservername"], ["-servername", "localhost"], [*good, "-tls1_1"], [*good, "-cipher", "AES128-SHA"],
                          [*good, "-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA256"]):
            r = s_client(c.port, *arguments, "-ign_eof")
            assert b"HTTP/1." not in r.stdout, arguments
    finally:
        c.kill()
