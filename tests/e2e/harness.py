"""harness: starts, kills and watches the real programs. Every fixture owns a fresh directory and free ports.

    Cloud(dir)  one tandem-cloud with TLS, its own store and tokens; .kill() is kill -9, .start() again keeps the store
    Edge(dir, cloud)  one tandem-edge
    Relay(port)  a TCP relay in front of a port that can be cut, delayed and recorded
"""
import atexit
import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

BIN = pathlib.Path(os.environ["TANDEM_BIN"])
MODEL = os.environ["TANDEM_MODEL"]
ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = WAIT_SECONDS = 300  # long: the machine may be slow or busy, and waiting costs nothing where what is waited for comes


def wait_until(condition, seconds=WAIT_SECONDS):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


GIVEN_PORTS = set()


def free_port():
    """Nobody gets it while its program is away, or before it has started: it is below those that the system hands out, and given once."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in GIVEN_PORTS:
            GIVEN_PORTS.add(port)
            return port


def http_get(url, timeout=WAIT_SECONDS):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout) as r:
        return r.read().decode()


class Program:
    """One process, its log, and how to tell that it is ready."""

    def __init__(self, directory, name):
        self.dir = pathlib.Path(directory)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log_path = self.dir / f"{name}.log"
        self.process = None
        self.env = dict(os.environ)
        atexit.register(self.kill)  # if its test has failed before it could

    def command(self):
        raise NotImplementedError

    def ready(self):
        raise NotImplementedError

    def start(self, wait=True):
        assert self.process is None or self.process.poll() is not None, f"{self.name} already runs"
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self):
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} exited with {self.process.returncode}: {self.log()[-2000:]}")
            try:
                self.ready()
                return
            except (OSError, urllib.error.URLError):
                time.sleep(0.01)
        raise RuntimeError(f"{self.name} is not ready: {self.log()[-2000:]}")

    def kill(self):
        """kill -9"""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def stop(self, seconds=WAIT_SECONDS):
        """SIGTERM; returns the exit code."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode if self.process else 0

    def log(self):
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


@functools.cache
def certificates(authority):
    """A folder of them, made once for all nodes of an authority."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="tandem-certs-"))
    atexit.register(shutil.rmtree, directory)
    subprocess.run([ROOT / "deploy/certs.sh", directory, "--client", "tester"], check=True, capture_output=True)
    return directory


class Cloud(Program):
    def __init__(self, directory, model=MODEL, extra=(), store=None, authority="everybody's"):
        super().__init__(directory, "cloud")
        self.model, self.extra = model, list(extra)
        self.port, self.admin_port = free_port(), free_port()
        self.certs = self.dir / "certs"
        self.tokens = self.dir / "tokens"
        self.store = pathlib.Path(store) if store else self.dir / "store"
        if not self.certs.exists():
            shutil.copytree(certificates(authority), self.certs)

    @property
    def ca(self):
        return str(self.certs / "ca.crt")

    @property
    def url(self):
        return f"https://localhost:{self.port}"

    def new_token(self, tenant="acme", principal="alice"):
        made = subprocess.run([BIN / "tandem-cloud", "token", "new", "--tenant", tenant, "--principal", principal, "--tokens-file", self.tokens],
                              check=True, capture_output=True, text=True)
        token = made.stdout.strip().splitlines()[-1].strip()
        if self.process and self.process.poll() is None:  # it looks at the file once a second
            assert wait_until(lambda: self.knows(token)), self.log()[-2000:]
        return token

    def knows(self, token):
        is_plain = "--plain" in map(str, self.command())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=self.ca)))
        try:
            opener.open(urllib.request.Request(f"http{'' if is_plain else 's'}://localhost:{self.port}/v1/models", headers={"Authorization": f"Bearer {token}"}),
                        timeout=WAIT_SECONDS).close()
        except urllib.error.HTTPError as e:
            assert e.code == 401, e
            return False
        return True

    def store_stat(self):
        said = subprocess.run([BIN / "tandem", "store", "stat", "--admin", f"http://127.0.0.1:{self.admin_port}", "--store-key-file", self.dir / "store.key",
                               "--json"], capture_output=True, text=True, check=True)
        return json.loads(said.stdout)

    def stored(self):
        """Blocks on its disk now; the metrics are a second old."""
        return self.store_stat()["blocks"]

    def settle(self, blocks=0):
        """So many blocks, at least, are on the disk, and no more are on their way: they are encoded and written behind the reply where that takes long."""
        assert wait_until(lambda: self.stored() >= blocks), f"{self.stored()} of {blocks} blocks were written"
        seen, since, until = None, time.monotonic(), time.monotonic() + WAIT_SECONDS
        while time.monotonic() - since < 0.5:
            assert time.monotonic() < until, "it goes on writing"
            now = self.stored(), self.metrics().get("tandem_store_queue_bytes", 0) > 0
            if now != seen or now[1]:
                seen, since = now, time.monotonic()
            time.sleep(0.1)

    def comes_back(self, ask, enough):
        """What `ask` returns of a node that has been killed and started, so that all is on the disk only: last how many tokens were cached, `enough` at least.
        A read that is late is computed instead, and tried again; what was not there would be written anew."""
        for _ in range(5):
            self.kill()
            self.start()
            before = self.stored()
            got = ask()
            if got[-1] >= enough:
                return got
            self.settle()
            assert self.stored() == before, f"{got[-1]} of {enough} tokens were on the disk"
        raise AssertionError(f"{got[-1]} of {enough} tokens were read in time")

    def command(self):
        return [BIN / "tandem-cloud", "--model", self.model, "--listen-port", str(self.port), "--admin-port", str(self.admin_port),
                "--cert", self.certs / "server.crt", "--key", self.certs / "server.key", "--tokens-file", self.tokens,
                "--store", self.store, "--store-key-file", self.dir / "store.key",
                *([] if "--device" in self.extra else ["--device", "cpu"]),  # a GPU has other arithmetic than the edge
                *([] if "--kv-stall-ms" in self.extra else ["--kv-stall-ms", "30000"]),  # KV that a busy machine keeps waiting is not recomputed
                *self.extra]

    def ready(self):
        http_get(f"http://127.0.0.1:{self.admin_port}/health")

    def metrics(self):
        return parse_metrics(http_get(f"http://127.0.0.1:{self.admin_port}/metrics"))


class Edge(Program):
    def __init__(self, directory, cloud, token, layers=8, model=MODEL, extra=(), cloud_port=None):
        super().__init__(directory, "edge")
        self.cloud, self.layers, self.model, self.extra = cloud, layers, model, list(extra)
        self.port = free_port()
        self.cloud_port = cloud_port or cloud.port
        self.token_file = self.dir / "token"
        self.token_file.write_text(token + "\n")
        self.token_file.chmod(0o600)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def command(self):
        return [BIN / "tandem-edge", "--model", self.model, "--cloud", f"localhost:{self.cloud_port}", "--ca", self.cloud.ca,
                "--token-file", self.token_file, "--edge-layers", str(self.layers), "--listen-port", str(self.port),
                "--data", self.dir / "data",
                *([] if "--cloud-timeout" in self.extra else ["--cloud-timeout", str(WAIT_SECONDS)]),  # a cloud that is killed may take its time to be back
                *self.extra]

    def ready(self):
        http_get(self.url + "/health")

    def metrics(self):
        return parse_metrics(http_get(self.url + "/metrics"))


def parse_metrics(text):
    """{'name{labels}': value}"""
    values = {}
    for line in text.splitlines():
        match = re.match(r"^([a-zA-Z_:][\w:]*(?:\{[^}]*\})?) (\S+)$", line)
        if match:
            values[match.group(1)] = float(match.group(2))
    return values


def unmasked(stream):
    """The payloads of a WebSocket client's frames, behind the request that opened it."""
    at, out = stream.find(b"\r\n\r\n") + 4, []
    while at + 6 <= len(stream):
        size, head = stream[at + 1] & 0x7F, 2
        if size >= 126:
            head = 4 if size == 126 else 10
            size = int.from_bytes(stream[at + 2:at + head], "big")
        key, body = stream[at + head:at + head + 4], stream[at + head + 4:at + head + 4 + size]
        mask = (key * (len(body) // 4 + 1))[:len(body)]
        out.append((int.from_bytes(body, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(body), "big"))
        at += head + 4 + size
    return b"".join(out)


class Relay:
    """Forwards TCP to a port. cut() drops every connection at once and refuses new ones until restore(); while `held` nothing comes through, without a word. Records bytes when asked."""

    def __init__(self, target_port, delay_s=0.0, record=False, by_record=False):
        self.target, self.delay, self.by_record, self.is_cut, self.held = target_port, delay_s, by_record, False, False
        self.recorded = bytearray() if record else None
        self.sent_streams = []  # of each connection, what went upward
        self.bytes_up = 0
        self.cut_after = None  # bytes upward after which the link is cut by itself
        self.rate = None  # bytes a second upward
        self.records_left = None  # so many TLS records more, of both directions, then every connection is dropped, and new ones are welcome
        self.trigger = None  # (bytes upward, what to do then, on a thread of its own)
        self.pairs, self.lock = set(), threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            with self.lock:
                self.pairs.add((near, far))
            for a, b, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pump, args=(a, b, up, (near, far)), daemon=True).start()

    def _pump(self, source, sink, up, pair):
        sent, part = bytearray(), bytearray()
        if up and self.recorded is not None:
            self.sent_streams.append(sent)
        try:
            while data := source.recv(16384 if self.rate else 65536):
                if self.recorded is not None:
                    self.recorded += data
                    sent += data
                if up:
                    self.bytes_up += len(data)
                    if self.cut_after is not None and self.bytes_up >= self.cut_after:
                        self.cut_after = None
                        self.cut()
                        return
                    self._pull_trigger()
                    if self.rate:
                        time.sleep(len(data) / self.rate)
                if self.delay:
                    time.sleep(self.delay)
                while self.held and not self.is_cut:
                    time.sleep(0.01)
                if not self.by_record:
                    sink.sendall(data)
                    continue
                part += data
                while len(part) >= 5 and len(part) >= (size := 5 + int.from_bytes(part[3:5], "big")):
                    if not self._let_pass():
                        return
                    sink.sendall(part[:size])
                    del part[:size]
        except OSError:
            pass
        self._close(pair)

    def _let_pass(self):
        """May one more record?"""
        with self.lock:
            if self.records_left is None:
                return True
            self.records_left = self.records_left - 1 if self.records_left > 0 else None
            pairs = [] if self.records_left is not None else list(self.pairs)
        for pair in pairs:
            self._close(pair)
        return self.records_left is not None

    def _pull_trigger(self):
        with self.lock:
            if not self.trigger or self.bytes_up < self.trigger[0]:
                return
            thread, self.trigger = threading.Thread(target=self.trigger[1], daemon=True), None
            thread.start()
            self.done = thread

    def _close(self, pair):
        with self.lock:
            self.pairs.discard(pair)
        for s in pair:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()

    def sent(self):
        """What WebSocket clients sent: a client's frames are masked, and a scan of the record itself would find nothing in them."""
        return b"".join(unmasked(bytes(s)) for s in self.sent_streams)

    def cut(self):
        self.is_cut = True
        with self.lock:
            pairs = list(self.pairs)
        for pair in pairs:
            self._close(pair)

    def restore(self):
        self.is_cut = False

    def at_bytes(self, size, action):
        """Run `action` once so many more bytes have gone upward."""
        self.done, self.trigger = None, (self.bytes_up + size, action)

    def fired(self):
        """Did it run? Waits for its end."""
        if self.done:
            self.done.join()
        return self.done is not None

    def close(self):
        self.cut()
        self.listener.close()


class Stack:
    """An edge, a relay, a cloud, which a subclass starts."""

    def close(self):
        self.edge.kill()
        self.relay.close()
        self.cloud.kill()
