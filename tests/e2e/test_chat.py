"""tandem chat at a terminal and in scripts: Ctrl-C, hints, --json, and what it says of turns that are not kept."""
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import ssl
import subprocess
import termios
import threading
import time

import openai
import pytest

from conftest import client_of
from harness import BIN, Cloud, Edge, ROOT, wait_until
from test_cli import ENV, lines, tandem

LONG = "Write a very long story about a ship and its crew, with many chapters."


class Terminal:
    """tandem on a terminal of its own."""

    def __init__(self, *arguments):
        self.shown = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(BIN / "tandem", ["tandem", *map(str, arguments)], {**ENV, "TERM": "xterm"})
        self.settings = termios.tcgetattr(self.fd)

    def wait_for(self, pattern, start=0):
        """The match of `pattern` in what was shown from `start` on; ten minutes of silence are a failure."""
        while not (m := re.compile(pattern.encode(), re.S).search(self.shown, start)):
            assert select.select([self.fd], [], [], 600)[0], self.shown[-500:]
            self.shown += os.read(self.fd, 4096)
        return m

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        """Its exit code; all that it showed is in `shown`, and the terminal is as it was."""
        try:
            while data := os.read(self.fd, 4096):
                self.shown += data
        except OSError:  # the other side is closed
            pass
        assert termios.tcgetattr(self.fd) == self.settings
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(params=["edge", "node"])
def at(request, cloud, edge, tmp_path):
    """Options that lead to an agent, and to a node."""
    if request.param == "edge":
        return "--url", edge.url
    key = tmp_path / "a key"
    key.write_text(cloud.token)
    key.chmod(0o600)
    return "--url", cloud.url, "--ca", cloud.ca, "--key-file", key


def told(conversation, at):
    return json.loads(tandem("conv", "show", conversation, *at, "--json").stdout)["messages"]


def test_ctrl_c_ends_the_reply_and_keeps_it(at):
    t = Terminal("chat", *at, "--seed", 1, "--max-tokens", 600)
    t.wait_for("> ")
    t.type(LONG + "\n")
    begun = t.wait_for(re.escape(LONG) + "\r\n(.{20})").end()
    t.type("\x03")
    ended = t.wait_for(r"\[ended here; what was said is kept\]\r\n> ", begun)
    t.type("/id\n")
    conversation = t.wait_for(r"conv-[0-9a-f]{24}", ended.end()).group(0).decode()
    kept = told(conversation, at)
    assert [m["role"] for m in kept][-2:] == ["user", "assistant"]
    said = t.shown[t.shown.index(LONG.encode()) + len(LONG):ended.start()].decode().replace("^C", "").replace("\r\n", "\n").strip()
    assert kept[-1]["content"].strip() == said, "the turn is what was shown"
    t.type("What is the ship called?\n")  # the conversation goes on, with that turn in it
    t.wait_for(r"called\?\r\n.+\r\n> ", ended.end())
    assert [m["role"] for m in told(conversation, at)][-4:] == ["user", "assistant"] * 2
    t.type("\x03")
    assert t.end() == 130
    assert f"go on later with: tandem chat {shlex.join(map(str, at))} --conversation {conversation}" in t.shown.decode()


def test_ctrl_c_ends_a_single_question(at):
    """In a script: the answer so far on stdout, and an exit code that says that it was cut."""
    p = subprocess.Popen([BIN / "tandem", "chat", *map(str, at), "--seed", "1", "--max-tokens", "600", "--conversation", "cut", LONG],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    begun = os.read(p.stdout.fileno(), 1000).decode()  # past any buffer of ours
    p.send_signal(signal.SIGINT)
    rest, err = p.communicate(timeout=600)
    assert p.returncode == 130 and "what was said is kept" in err
    assert told("cut", at)[-1]["content"].strip() == (begun + rest).strip()
    tandem("chat", *at, "--max-tokens", 2, "--conversation", "cut", "Go on.")  # it can
    assert [m["role"] for m in told("cut", at)][-4:] == ["user", "assistant"] * 2
    tandem("conv", "rm", "cut", *at)


@pytest.mark.parametrize("where", ["edge", "node"])
def test_a_reply_is_stopped_at_any_moment(where, cloud, edge):
    """Before its first token, within, while its turn is being stored, afterwards: the reply is whole and its turn is there once, or it ended with an error
    and there is no turn."""
    client = client_of(edge) if where == "edge" else client_of(cloud, cloud.token, cloud.ca)
    ask = dict(model="default", messages=[{"role": "user", "content": "Count to ten."}], max_tokens=12, temperature=0)
    begun = time.monotonic()
    client.chat.completions.create(**ask, extra_body={"ignore_eos": True})
    whole, kept, lost = time.monotonic() - begun, 0, 0
    for i in range(20):
        over, name = threading.Event(), f"stop-{where}-{i}"

        def stop():
            time.sleep(whole * i / 10)  # the last ones come when it is over, whatever the machine does meanwhile
            while not over.wait(0.002):
                client.post(f"/conversations/{name}/stop", cast_to=object, body={})

        stopper = threading.Thread(target=stop)
        stopper.start()
        try:
            r = client.chat.completions.create(**ask, extra_body={"conversation": name, "ignore_eos": True})
            said, kept = r.choices[0].message.content, kept + 1
            assert 0 < r.usage.completion_tokens <= 12
        except openai.APIError:
            said, lost = None, lost + 1
        finally:
            over.set()
            stopper.join()
        if said is None:
            with pytest.raises(openai.NotFoundError):
                client.get(f"/conversations/{name}", cast_to=object)
        else:
            assert [m["content"] for m in client.get(f"/conversations/{name}", cast_to=object)["messages"]][-1].strip() == said.strip()
            client.delete(f"/conversations/{name}", cast_to=object)
    assert kept > 0 and kept + lost == 20


def is_whole(request):
    head, end, body = request.partition(b"\r\n\r\n")
    told = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
    return end and len(body) >= (int(told.group(1)) if told else 0)


class Server:
    """One that says what a test wants: each connection gets the next of `answers`, bytes or a function of the request, and is closed."""

    def __init__(self, *answers):
        self.listener, self.asked = socket.create_server(("127.0.0.1", 0)), []
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, args=(answers,), daemon=True).start()

    def wait_for_requests(self, count):
        assert wait_until(lambda: len(self.asked) >= count)

    def _serve(self, answers):
        threads = []
        for answer in answers:
            connection, _ = self.listener.accept()
            threads.append(threading.Thread(target=self._answer, args=(connection, answer), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _answer(self, connection, answer):
        with connection:
            request, more = b"", True
            while more and not is_whole(request):  # or closing would reset
                request += (more := connection.recv(1 << 16))
            self.asked.append(request)
            connection.sendall(HEAD + answer)
            if not answer.endswith(b"[DONE]\n\n"):
                while connection.recv(100):  # until the client has had enough
                    pass


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nX-Conversation-Id: c-1\r\n\r\n"
HELLO = b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_ctrl_c_before_the_first_word():
    """There is nothing to keep: the connection is dropped, and the line that says that it waits is gone."""
    server = Server(b"")
    t = Terminal("chat", "--url", server.url, "Hi.")
    t.wait_for("waiting for the first token")
    t.type("\x03")
    assert t.end() == 130
    assert re.search(rb"\r\x1b\[Ktandem chat: ended; nothing of this turn is kept\r\n$", t.shown)
    assert len(server.asked) == 1


def test_ctrl_c_twice():
    """A server that does not end the reply when it is asked to: the second Ctrl-C does not wait for it, nor for another question."""
    server = Server(HELLO, b"{}")
    t = Terminal("chat", "--url", server.url)
    t.wait_for("> ")
    t.type("Hi.\n")
    t.wait_for("Hello")
    t.type("\x03")
    server.wait_for_requests(2)
    assert server.asked[1].startswith(b"POST /v1/conversations/c-1/stop ")
    t.type("\x03")
    assert t.end() == 130
    assert b"nothing of this turn is kept" in t.shown


def test_a_turn_that_is_not_kept_is_told():
    lost = b'data: {"choices":[],"conversation":"c-1","conversation_kept":false,"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    r = tandem("chat", "--url", Server(HELLO + lost + DONE).url, "Hi.")
    assert r.stdout == "Hello\n" and "could not be stored" in r.stderr
    r = tandem("chat", "--url", Server(HELLO + lost + DONE).url, "--json", "Hi.")
    assert json.loads(r.stdout) == {"conversation": "c-1", "content": "Hello", "finish_reason": "", "conversation_kept": False,
                                    "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    assert "could not be stored" not in tandem("chat", "--url", Server(HELLO + DONE).url, "Hi.").stderr


def test_plans_are_told_in_words():
    """Each reason for which there are no estimates, and estimates of a device that cannot do it alone."""
    def explained(**plan):
        told = {"choices": [], "timings": {"first_token_ms": 40, "plan": {"layers": 8, "tokens": 324, "kv_tokens": 320, "plans": 1, **plan}}}
        said = tandem("chat", "--url", Server(HELLO + f"data: {json.dumps(told)}\n\n".encode() + DONE).url, "--explain", "Hi.").stderr
        return said[:said.index("[what happened:")]

    begun = "[plan: 8 layers here of 324 prompt tokens from token 0 on; KV of 320 of them sent"
    assert explained(codec="l1", hidden="f16", why="given") == begun + " in l1, rows in f16; the number of layers was given]\n"
    assert explained(why="continued") == begun + "; the reply was taken up again]\n"
    assert explained(why="unable") == begun + "; this device could have no part in it]\n"
    assert explained(why="of later days") == explained() == begun + "]\n"
    assert explained(restored_tokens=64).endswith("[restored: KV of 64 tokens that the cloud had lost, as this device held it]\n")
    assert "[first tokens here: " in explained(local=True)
    times = {"first_token_ms": 50, "t16_ms": 90, "cloud_alone_first_token_ms": 60, "cloud_alone_t16_ms": 100, "edge_alone_first_token_ms": 0, "edge_alone_t16_ms": 0}
    assert "16th 90 ms (the cloud alone: 60, 100); a token" in explained(estimates=times)
    times |= {"edge_alone_first_token_ms": 70, "edge_alone_t16_ms": 140}
    assert "(the cloud alone: 60, 100; this device alone: 70, 140); a token" in explained(estimates=times)


def test_what_the_cloud_has_not_told_is_not_shown():
    """Of a reply that the device has made to its end."""
    def explained(**timings):
        told = {"choices": [], "timings": {"edge_prefill_ms": 74, "plan": {"layers": 0, "plans": 1, "local": True}, **timings}}
        return tandem("chat", "--url", Server(HELLO + f"data: {json.dumps(told)}\n\n".encode() + DONE).url, "--explain", "Hi.").stderr

    said = explained(local_tokens=60, confirmed_tokens=56)
    assert "computing 74 ms here; what it took there is not told (56 tokens confirmed by the end); " in said and "recomputed" not in said
    assert "computing 74 ms here, 30 ms there; 0.0 KiB sent; 2 tokens recomputed there; " in explained(cloud_prefill_ms=30, recomputed_tokens=2)


def test_a_preference_goes_with_each_message(edge):
    """Also with those of a chat that is taken up later; the agent says which there are."""
    servers = [Server(HELLO + DONE) for _ in range(2)]
    t = Terminal("chat", "--url", servers[0].url, "--prefer", "private", "Hi.")
    assert t.end() == 0
    again = shlex.split(re.search(r"go on with: (.*)\r\n", t.shown.decode()).group(1))
    assert again[again.index("--prefer") + 1] == "private"
    tandem("chat", "--url", servers[1].url, "Hi.")
    asked = [json.loads(s.asked[0].partition(b"\r\n\r\n")[2]) for s in servers]
    assert asked[0]["prefer"] == "private" and "prefer" not in asked[1]
    r = tandem("chat", "--url", edge.url, "--prefer", "cheap", "Hi.", code=1)
    assert "cloud-cost" in r.stderr and len(lines(r)) == 1


def test_one_question_tells_how_to_go_on(at):
    """At a terminal: with all options that lead there. In a pipe the answer alone, or one object."""
    t = Terminal("chat", *at, "--temperature", 0, "--max-tokens", 4, "Name a river.")
    assert t.end() == 0
    command = re.search(r"go on with: (.*)\r\n", t.shown.decode()).group(1)
    assert shlex.split(command)[:-1] == ["tandem", "chat", *map(str, at), "--conversation"]
    again = [*shlex.split(command)[1:], "--temperature", 0, "--max-tokens", 4, "--json", "And a lake?"]
    r = json.loads(tandem(*again).stdout)
    assert r["conversation"] == shlex.split(command)[-1] and r["usage"]["completion_tokens"] == 4 and r["finish_reason"] == "length"
    assert r["timings"]["total_ms"] > 0 and r["conversation_kept"] is True
    assert tandem("chat", *at, "--max-tokens", 4, "Name a river.").stderr == ""


def test_messages_from_standard_input(edge):
    """Line by line, or with - all of it as one; what is no text is refused before anything is sent."""
    at = ("--url", edge.url, "--max-tokens", 4, "--json")
    r = tandem("chat", *at, stdin="One.\n\nTwo.\r\n")
    objects = [json.loads(x) for x in r.stdout.splitlines()]
    assert len(objects) == 2 and objects[0]["conversation"] == objects[1]["conversation"]
    r = json.loads(tandem("chat", *at, "-", stdin="One.\nTwo.\n").stdout)
    assert [m["content"] for m in told(r["conversation"], at[:2])][-2] == "One.\nTwo."
    for message in (b"caf\xe9", b"a\0b", b"\n"):
        p = subprocess.run([BIN / "tandem", "chat", *map(str, at), "-"], input=message, capture_output=True, env=ENV)
        assert p.returncode == 1 and p.stdout == b"" and len(p.stderr.splitlines()) == 1


def test_output_that_cannot_be_written(edge):
    for command in (("chat", "--max-tokens", "2", "Hi."), ("chat", "--json", "--max-tokens", "2", "Hi."), ("conv", "ls")):
        with open("/dev/full", "w") as full:
            p = subprocess.run([BIN / "tandem", *command, "--url", edge.url], stdout=full, stderr=subprocess.PIPE, text=True, env=ENV)
        assert p.returncode == 1 and "is the disk full?" in p.stderr, p.stderr


def test_hints_at_the_wrong_address(cloud, edge):
    for url, options, hint in ((edge.url + "/v1", (), None), (edge.url + "/v1/v1", (), "/v1 twice"), (edge.url.replace("http", "https"), (), "http://"),
                               (cloud.url.replace("https", "http"), (), "https://"), (cloud.url, (), "--ca FILE"), (cloud.url, ("--ca", "/nowhere"), "PEM"), (cloud.url, ("--ca", cloud.ca), "--key-file FILE"),
                               (f"http://127.0.0.1:{cloud.admin_port}", (), "--listen-port"), ("ftp://localhost", (), "http://")):
        r = tandem("conv", "ls", "--url", url, *options, code=1 if hint else 0)
        assert not hint or (len(lines(r)) == 1 and hint in r.stderr), (url, r.stderr)


def refuse_all(context, listener):
    """Clients that see the certificate; until the listener is closed."""
    try:
        while True:
            with listener.accept()[0] as connection:
                try:
                    context.wrap_socket(connection, server_side=True)
                except OSError:  # the client has seen enough
                    pass
    except OSError:
        pass


def test_hints_at_certificates(tmp_path):
    """What is wrong with one, and what would help."""
    folder, other = tmp_path / "certs", tmp_path / "other"
    for command in ([ROOT / "deploy/certs.sh", folder, "--name", "localhost"], [ROOT / "tests/dated_certs.sh", folder],
                    [ROOT / "deploy/certs.sh", other, "--name", "cloud.example"]):
        subprocess.run(command, check=True, capture_output=True)
    for cert, key, ca, host, hint in ((folder / "dates/expired.crt", folder / "server.key", folder / "ca.crt", "127.0.0.1", "renewed"),
                                      (folder / "dates/future.crt", folder / "server.key", folder / "ca.crt", "127.0.0.1", "clock"),
                                      (other / "server.crt", other / "server.key", folder / "ca.crt", "127.0.0.1", "--ca FILE"),
                                      (folder / "server.crt", folder / "server.key", folder / "ca.crt", "127.0.0.2", "--url names the host")):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        with socket.create_server((host, 0)) as listener:
            threading.Thread(target=refuse_all, args=(context, listener), daemon=True).start()
            r = tandem("conv", "ls", "--url", f"https://{host}:{listener.getsockname()[1]}", "--ca", ca, code=1)
            assert hint in r.stderr and len(lines(r)) == 1, r.stderr
            listener.shutdown(socket.SHUT_RDWR)


def test_a_device_that_did_it_all(tmp_path):
    """Without the cloud: --explain says who made the reply; a device that was never connected with the option says what it lacks."""
    c = Cloud(tmp_path / "c")
    c.start()
    e = Edge(tmp_path / "e", c, c.new_token(), "auto", extra=["--cloud-timeout", "1"])
    e.start()
    tandem("chat", "--url", e.url, "--max-tokens", 2, "Hi.")  # it has been connected
    assert e.stop() == 0
    c.kill()
    e.extra += ["--offline", "continue"]
    e.start(wait=False)
    try:
        assert wait_until(lambda: "listening on" in e.log().split("stopped")[-1]), e.log()
        r = tandem("chat", "--url", e.url, "Hi.", code=1)
        waited, said = lines(r)[:-1], lines(r)[-1]
        assert "identity" in said and "connect it once" in said and all(x.startswith("waiting: ") for x in waited) and len(waited) <= 1, r.stderr
    finally:
        e.stop()
    c.start()
    e.start()  # now it is
    c.kill()
    assert wait_until(lambda: e.metrics()["tandem_edge_connected"] == 0)
    try:
        said = tandem("chat", "--url", e.url, "--explain", "--max-tokens", 4, "Name a river.").stderr
        assert "this device did it all" in said and "no plan:" not in said, said
        assert "[the cloud was away: 4 tokens from token 0 on made here" in said and "16th 0" not in said
    finally:
        e.stop()
