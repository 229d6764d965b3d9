"""mini_edge: a tandem.v1 edge that does what a test tells it, right or wrong. It has no model: rows and KV are what the test makes up.

Written from protocol/WIRE.md and shared/KV_FORMAT.md; it shares no code with Tandem. One thread, one blocking TLS socket, WebSocket by hand, so that
any byte of any layer can be wrong."""
import base64
import functools
import hashlib
import os
import socket
import ssl
import struct
import subprocess

from harness import BIN, MODEL

HELLO, WELCOME, OPEN, OPEN_ACK, PLAN, HIDDEN, KV_BLOCK, INGESTED, NEED, FETCH, GENERATE, TOKEN, DONE, CANCEL, CREDIT, PING, ERROR, GOAWAY = range(1, 19)
RAW, F32 = 15, 0
BLOCK = 64


class Model:
    """SmolLM2-135M, as far as its KV layout goes."""

    layers, width, kv_heads, head_dim = 30, 576, 3, 64
    layout = hashlib.sha256(b"tandem-kv-layout" + struct.pack("<4I2f", BLOCK, 1, 0, 64, 100000.0, 1.0) + bytes(64) + struct.pack("<I", 1)).digest()

    @staticmethod
    @functools.cache
    def fingerprint():
        said = subprocess.run([BIN / "tandem", "model", "fingerprint", MODEL], check=True, capture_output=True, text=True).stdout
        return bytes.fromhex(next(word for word in said.split() if len(word) == 64))


# ---- protobuf, by hand ----


def varint(n):
    n &= 0xFFFFFFFFFFFFFFFF
    out = b""
    while n >= 0x80:
        out += bytes([n & 0x7F | 0x80])
        n >>= 7
    return out + bytes([n])


def field(number, value):
    if isinstance(value, (bytes, str)):
        raw = value.encode() if isinstance(value, str) else value
        return varint(number << 3 | 2) + varint(len(raw)) + raw
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(int(value))


def fields(*values):
    return b"".join(field(i + 1, v) for i, v in enumerate(values) if v is not None)


def parse(raw):
    """{field number: last value}"""
    found, at = {}, 0

    def take():
        nonlocal at
        shift = value = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        key = take()
        if key & 7 == 0:
            found[key >> 3] = take()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or take()
            found[key >> 3] = raw[at:at + size]
            at += size
    return found


def frame(kind, stream, header=b"", payload=b"", flags=0):
    return struct.pack("<BBHIII", kind, flags, len(header), stream, len(payload), 0) + header + payload


# ---- KV pieces ----

CRC_TABLE = []
for _n in range(256):
    for _ in range(8):
        _n = _n >> 1 ^ (0x82F63B78 if _n & 1 else 0)
    CRC_TABLE.append(_n)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def piece(block, layer, is_value, payload, first=0, count=BLOCK, codec=RAW, heads=Model.kv_heads, dim=Model.head_dim, quality=(0, 1, 0, 0), crc=None):
    """A whole piece. quality: fidelity, numerics, provenance; by default it claims to be the cloud's own, lossless."""
    head = struct.pack("<I4B4BI5H2xI", 0x4B564454, 1, codec, is_value, 0, *quality, block, first, count, layer, heads, dim, len(payload))
    crc = crc32c(head + bytes(32) + payload) if crc is None else crc
    return head + struct.pack("<I", crc) + bytes(28) + payload


# ---- the connection ----


class Closed(Exception):
    pass


class MiniEdge:
    def __init__(self, cloud, token, hello=True, timeout=600):
        Model.fingerprint()  # takes its time, and a connection is to greet soon
        context = ssl.create_default_context(cafile=cloud.ca)
        raw = socket.create_connection(("127.0.0.1", cloud.port), timeout=timeout)
        self.socket = context.wrap_socket(raw, server_hostname="localhost")
        self.buffer, self.stream, self.frames = b"", -1, []
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall((f"GET /tandem HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
                             "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: tandem.v1\r\n\r\n").encode())
        while b"\r\n\r\n" not in self.buffer:
            self._fill()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        assert b" 101 " in head.splitlines()[0], head
        if hello:
            self.send(HELLO, 0, self.hello_header(token))
            self.welcome = self.expect(WELCOME)

    @staticmethod
    def hello_header(token, **other):
        values = {1: fields(1, Model.layout, 1), 2: Model.fingerprint(), 3: Model.layers, 4: 8, 5: 0x8003, 6: 7, 7: token, 8: "mini/1", **other}
        return b"".join(field(n, v) for n, v in values.items())

    def _fill(self):
        try:
            data = self.socket.recv(65536)
        except (ConnectionError, ssl.SSLError) as e:
            raise Closed(str(e)) from e
        if not data:
            raise Closed("end of stream")
        self.buffer += data

    def _take(self, size):
        while len(self.buffer) < size:
            self._fill()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def send_message(self, data, opcode=2, final=True, mask=True, size=None):
        size = len(data) if size is None else size
        head = bytes([opcode | (0x80 if final else 0)])
        bit = 0x80 if mask else 0
        if size < 126:
            head += bytes([bit | size])
        elif size < 65536:
            head += bytes([bit | 126]) + struct.pack(">H", size)
        else:
            head += bytes([bit | 127]) + struct.pack(">Q", size)
        try:  # a mask of zeros leaves the bytes as they are
            self.socket.sendall(head + (bytes(4) if mask else b"") + data)
        except (ConnectionError, ssl.SSLError) as e:
            raise Closed(str(e)) from e

    def send(self, kind, stream, header=b"", payload=b"", flags=0):
        self.send_message(frame(kind, stream, header, payload, flags))

    def receive(self):
        """(type, stream, fields, payload) of the next frame."""
        message = b""
        while True:
            first, second = self._take(2)
            size = second & 0x7F
            if size == 126:
                size, = struct.unpack(">H", self._take(2))
            elif size == 127:
                size, = struct.unpack(">Q", self._take(8))
            data = self._take(size)
            if first & 0x0F == 8:
                raise Closed(data[2:].decode(errors="replace"))
            if first & 0x0F in (9, 10):
                continue
            message += data
            if first & 0x80:
                break
        kind, _, header_size, stream, _, _ = struct.unpack("<BBHIII", message[:16])
        return kind, stream, parse(message[16:16 + header_size]), message[16 + header_size:]

    def expect(self, *kinds, stream=None):
        """The fields of the next frame of one of these kinds; others are passed over."""
        while True:
            kind, on, header, payload = self.receive()
            if kind == PING and not header.get(2):
                self.send(PING, 0, fields(header.get(1, 0), True))
            if kind in kinds and stream in (None, on):
                self.last = (kind, payload)
                return header
            if kind == ERROR:
                raise Closed(header.get(2, b"").decode())

    def next_stream(self):
        self.stream += 2
        return self.stream

    def open(self, ids, attempt=1, request_id=None, held=(), no_cache=False, accept=1):
        stream = self.next_stream()
        held_raw = struct.pack(f"<{len(held)}I", *held)
        header = fields(request_id or os.urandom(16), attempt, None, None, None, len(ids), len(held),
                        hashlib.sha256(held_raw).digest() if held else None, accept, no_cache)
        self.send(OPEN, stream, header, struct.pack(f"<{len(ids)}I", *ids) + held_raw)
        return stream

    def plan(self, stream, epoch, *ranges):
        """ranges: (first, count, layers[, codec, dtype])"""
        self.send(PLAN, stream, field(1, epoch) + b"".join(field(2, fields(*(tuple(r) + (RAW, F32))[:5])) for r in ranges))

    def bulk(self, kind, stream, header, payload, part=200_000):
        for offset in range(0, len(payload), part):
            tail = (None, offset, len(payload)) if kind == KV_BLOCK else (offset, len(payload))
            names = (6, 7) if kind == HIDDEN else (5, 6)
            self.send(kind, stream, header + b"".join(field(n, v) for n, v in zip(names, [v for v in tail if v is not None])), payload[offset:offset + part])

    def hidden(self, stream, epoch, first, count, layer, payload, dtype=F32):
        self.bulk(HIDDEN, stream, fields(epoch, first, count, layer, dtype), payload)

    def kv(self, stream, epoch, block, layer, is_value, payload):
        self.bulk(KV_BLOCK, stream, fields(epoch, block, layer, is_value), payload)

    def generate(self, stream, count, **other):
        values = {1: count, 4: 1.0, 6: 1.0, 13: True, **other}
        self.send(GENERATE, stream, b"".join(field(n, v) for n, v in values.items()))

    def reply(self, stream):
        """The reply's ids and the fields of DONE."""
        ids = []
        while True:
            header = self.expect(TOKEN, DONE, stream=stream)
            kind, payload = self.last
            if kind == DONE:
                return ids, header
            at = header.get(2, 0)
            assert at == len(ids), "a gap or a repeat"
            ids += struct.unpack(f"<{len(payload) // 4}I", payload)

    def close(self):
        self.socket.close()
