"""Bad starts: one line that says what is wrong and what to do, and an exit code that is not 0."""
import contextlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import urllib.error

import pytest

from harness import BIN, MODEL, ROOT, Cloud, Edge, http_get, wait_until


def fails(command, *words, code=None):
    r = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600)
    assert r.returncode != 0, r.stdout + r.stderr
    assert code is None or r.returncode == code
    lines = [line for line in r.stderr.strip().splitlines() if " INFO " not in line]
    assert len(lines) == 1, r.stderr
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


def replaced(command, option, value):
    command = list(map(str, command))
    if option in command:
        command[command.index(option) + 1] = str(value)
    else:
        command += [option, str(value)]
    return command


@pytest.fixture
def node(tmp_path):
    c = Cloud(tmp_path / "c")
    c.new_token()
    return c


def test_no_model(node):
    fails(replaced(node.command(), "--model", "/nowhere.gguf"), "/nowhere.gguf")


def test_bad_model(node, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    fails(replaced(node.command(), "--model", bad), "bad.gguf")
    short = tmp_path / "short.gguf"
    with open(MODEL, "rb") as f:
        short.write_bytes(f.read(20_000_000))
    fails(replaced(node.command(), "--model", short), "short.gguf")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU here")
def test_no_gpu(tmp_path):
    """`auto` says why it computes on the CPU; a GPU that was asked for by name is not replaced."""
    c = Cloud(tmp_path / "c", extra=["--device", "auto"])
    c.new_token()
    c.start()
    assert "computing on the CPU" in c.log()
    assert c.stop() == 0
    fails(replaced(c.command(), "--device", "cuda:0"), "--device cpu")


def test_port_in_use(node):
    with socket.create_server(("127.0.0.1", 0)) as s:
        fails(replaced(node.command(), "--listen-port", s.getsockname()[1]), str(s.getsockname()[1]), "--listen-port")


def test_missing_certificate(node):
    fails(replaced(node.command(), "--cert", "/nowhere.crt"), "/nowhere.crt")


def test_bad_flags(node, tmp_path):
    fails([BIN / "tandem-cloud", "--no-such-flag"], "--no-such-flag", code=2)
    fails(replaced(node.command(), "--threads", "many"), "threads", "many", code=2)
    fails([BIN / "tandem-edge", "--edge-layers", "-7"], "edge-layers", code=2)
    fails(replaced(node.command(), "--store-size", "10"), "store-size", "at least 16M", "10 bytes", code=2)
    e = Edge(tmp_path / "e", node, "token")
    fails(replaced(e.command(), "--kv-disk", "100"), "kv-disk", "at least 16M", code=2)
    fails([BIN / "tandem", "model", "inspect", "/nowhere.gguf"], "/nowhere.gguf", code=1)
    assert subprocess.run([BIN / "tandem", "dance"], capture_output=True).returncode == 2


def test_no_master_key(tmp_path):
    (tmp_path / "store").mkdir()
    fails([BIN / "tandem", "store", "ls", "--store", tmp_path / "store"], "--store-key-file", "TANDEM_STORE_KEY", code=1)


def test_a_key_that_cannot_be_made(node):
    """The line says why, and not that the disk fails."""
    (node.dir / "file").write_text("")
    fails(replaced(node.command(), "--store-key-file", node.dir / "file" / "key"), "Not a directory")


def in_group(program, size):
    """Starts it in a group of processes that may take so much memory; skips where none can be made. Returns the group."""
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = pathlib.Path(root) / f"tandem-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                with open(group / limit, "r+") as f:  # it is there by itself
                    f.write(str(size))
                with open(program.log_path, "ab") as log:
                    program.process = subprocess.Popen([str(c) for c in program.command()], stdout=log, stderr=log,
                                                       preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
                return group
            except (OSError, subprocess.SubprocessError):
                group.rmdir()
    pytest.skip("cannot make a group of processes with limited memory here")


def test_a_group_without_room(node):
    """Where weights and KV pages do not fit into a container's memory the node says so, instead of being killed under load."""
    node.extra = ["--kv-memory", "300M"]
    group = in_group(node, 400 << 20)
    try:
        assert node.process.wait(600) == 1
        assert "KV pages 299 MiB" in node.log() and "lower --kv-memory" in node.log(), node.log()
    finally:
        node.kill()
        group.rmdir()


def test_token_file_open_to_all(node, tmp_path):
    e = Edge(tmp_path / "e", node, "secret-token")
    e.token_file.chmod(0o644)
    line = fails(e.command(), "chmod")
    assert "secret-token" not in line


def test_store_locked(node):
    node.start()
    try:
        second = replaced(replaced(node.command(), "--listen-port", 0), "--admin-port", 0)
        fails(second, str(node.store))
    finally:
        node.kill()


def test_admin_port_says_what_it_is(node):
    node.start()
    try:
        for path, hint in (("/store", "tandem store stat --admin"), ("/store/", "/store/stat"), ("/v1/models", "--listen-port"), ("/", "/metrics")):
            with pytest.raises(urllib.error.HTTPError) as e:
                http_get(f"http://127.0.0.1:{node.admin_port}{path}")
            assert e.value.code == 404 and hint in e.value.read().decode(), path
    finally:
        node.kill()


def test_revoked_token_is_told(node):
    token = [BIN / "tandem-cloud", "token"]
    at = ["--tokens-file", node.tokens]
    identity = subprocess.run([*token, "list", *at], capture_output=True, text=True, check=True).stdout.splitlines()[1].split()[0]
    r = subprocess.run([*token, "revoke", identity, *at], capture_output=True, text=True, check=True)
    assert identity in r.stdout and str(node.tokens) in r.stdout and len(r.stdout.splitlines()) == 1
    fails([*token, "revoke", identity, *at], identity, code=1)
    assert "list" in subprocess.run([*token, "--help"], capture_output=True, text=True).stdout


def test_certs_want_a_folder():
    fails([ROOT / "deploy/certs.sh"], "certs.sh certs --name", code=1)


def test_quickstart_looks_for_the_model_first():
    fails([ROOT / "deploy/quickstart.sh", "--model", "/nowhere.gguf"], "/nowhere.gguf", code=1)


def test_full_disk(tmp_path):
    """A tmpfs of 24 MiB: the node serves, the store stops writing, nothing fails."""
    mount = tmp_path / "full"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    c = Cloud(tmp_path / "c", store=mount / "store")
    token = c.new_token()
    try:
        from conftest import client_of
        c.start()
        client = client_of(c, token, c.ca)
        for i in range(3):
            r = client.chat.completions.create(model="default", messages=[{"role": "user", "content": f"{i} words and words " * 300}], temperature=0, max_tokens=4)
            assert r.choices[0].message.content is not None
        assert c.process.poll() is None
    finally:
        c.kill()
        subprocess.run(["umount", "-l", mount])


def test_without_proc(node):
    """A machine that does not say how much memory is free: the node asks how much it may take."""
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /proc && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    fails([*hidden, *node.command()], "/proc/meminfo", "--kv-memory", code=1)


def under(program, limit, size):
    """Starts it under a limit, with signals as a shell leaves them; Python ignores SIGXFSZ."""
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(limit, (size, size))
    with open(program.log_path, "ab") as log:
        program.process = subprocess.Popen([str(c) for c in program.command()], stdout=log, stderr=log, preexec_fn=limited)


def test_files_that_may_not_grow(tmp_path):
    """Under `ulimit -f` no block fits into a file: both programs serve and keep what is said, as on a full disk."""
    from conftest import client_of
    c = Cloud(tmp_path / "c")
    e = Edge(tmp_path / "e", c, c.new_token())
    ask = dict(model="default", temperature=0, max_tokens=4)
    try:
        for program in (c, e):
            under(program, resource.RLIMIT_FSIZE, 1 << 20)
            program.wait_ready()
        client = client_of(e)
        for i in range(3):
            r = client.chat.completions.create(messages=[{"role": "user", "content": f"{i} words and words " * 100}], **ask)
            assert r.choices[0].message.content is not None
        assert wait_until(lambda: "writes are off: disk full" in c.log() + e.log()), "control: the limit was met"
        assert e.stop() == 0 and c.stop() == 0
        c.start(), e.start()  # without a limit
        assert client.get(f"/conversations/{r.model_extra['conversation']}", cast_to=object)["id"]
    finally:
        e.kill()
        c.kill()


def test_memory_that_is_refused(node):
    under(node, resource.RLIMIT_AS, 512 << 20)
    assert node.process.wait(600) == 1
    assert "ulimit -v" in node.log() and "at most" not in node.log(), node.log()


def test_help_and_version():
    for program in ("tandem", "tandem-edge", "tandem-cloud"):
        for flag in ("--help", "--version"):
            r = subprocess.run([BIN / program, flag], capture_output=True, text=True)
            assert r.returncode == 0 and r.stdout and not r.stderr
