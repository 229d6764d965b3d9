"""What README.md and ARCHITECTURE.md say is true.

Examples. A fenced block whose first line is ```sh test, ```python test or ```c test is run against a cloud and an edge, in the order of the page, in one
directory for the page. The environment names the two: EDGE and CLOUD (addresses), CA and TOKEN (how to come in to the cloud), MODEL (the file), CLOUD_HOST
(host:port for edges), ADMIN and STORE_KEY (the node's admin listener, and the file with its master key), PREFIX (where tandem.h and libtandem are). A comment that ends in `=> TEXT` says that TEXT appears in what the block prints, as often as the page says it.

"Running it for real" is run too, in the order of the page: a block whose first line is ```sh test server or ```sh test device on the machine of that name, which is a folder here, with a checkout, a root directory to install into, and scp between the two.
A block that `stays` is a program that is left running. Names and ports are those of this machine instead of the page's. And `quickstart.sh --serve` is run as the page says, but for what it downloads and builds.

Also: the tables of flags are those of --help, links lead somewhere, and every file, test and constant that ARCHITECTURE.md names exists.

    python test_docs.py --write      brings the tables of flags in README.md up to date (TANDEM_BIN and TANDEM_MODEL set, as run.sh does)
"""
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from harness import BIN, MODEL, ROOT, START_SECONDS, free_port

README, ARCHITECTURE = ROOT / "README.md", ROOT / "ARCHITECTURE.md"
PROGRAMS = ("tandem-edge", "tandem-cloud")
BLOCK = re.compile(r"^```(sh|python|c) test\n(.*?)^```$", re.M | re.S)
MACHINE_BLOCK = re.compile(r"^```sh test ((?:server|device)[a-z ]*)\n(.*?)^```$", re.M | re.S)
EXPECTED = re.compile(r"=> (.+?)(?:   .*)?(?: \*/)?$", re.M)


def blocks(page):
    return [(m.group(1), m.group(2), page.read_text()[:m.start()].count("\n") + 1) for m in BLOCK.finditer(page.read_text())]


# ---- examples ----


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory, cloud, edge):
    """The environment of the examples and their directory."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}  # they are settings to the programs
    env = dict(plain, EDGE=edge.url, CLOUD=cloud.url, CA=cloud.ca, TOKEN=cloud.token, MODEL=MODEL, CLOUD_HOST=f"localhost:{cloud.port}",
               ADMIN=f"http://127.0.0.1:{cloud.admin_port}", STORE_KEY=str(cloud.dir / "store.key"),
               PATH=f"{BIN}:{plain['PATH']}", NO_COLOR="1")
    prefix = tmp_path_factory.mktemp("prefix")
    (prefix / "include").mkdir()
    (prefix / "lib").mkdir()
    shutil.copy(ROOT / "edge/tandem.h", prefix / "include")
    for library in (BIN.parent / "edge").glob("libtandem.so*"):
        shutil.copy(library, prefix / "lib", follow_symlinks=False)
    env["PREFIX"] = str(prefix)
    return env, tmp_path_factory.mktemp("examples")


def run_block(language, code, env, directory):
    if language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", code]
    elif language == "python":
        command = [sys.executable, "-c", code]
    else:
        (directory / "example.c").write_text(code)
        library = f"{env['PREFIX']}/lib"
        subprocess.run(["cc", "-std=c17", "-Wall", "-Wextra", "-Werror", "-I", f"{env['PREFIX']}/include", "example.c", "-o", "example", "-L", library,
                        f"-Wl,-rpath,{library}", "-ltandem"], check=True, cwd=directory)
        (directory / "token").write_text(env["TOKEN"])
        (directory / "token").chmod(0o600)
        command = ["./example", env["MODEL"], env["CLOUD_HOST"], env["CA"], "token", "data"]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=600)


def as_said(r, code, line):
    said, expected = r.stdout + r.stderr, EXPECTED.findall(code)
    assert r.returncode == 0, f"README.md:{line}: {said}"
    for text in expected:
        assert said.count(text) >= expected.count(text), f"README.md:{line}: no {text!r} in: {said}"


@pytest.mark.parametrize("language,code,line", blocks(README), ids=[f"README.md:{line}" for _, _, line in blocks(README)])
def test_readme_example(surroundings, language, code, line):
    env, directory = surroundings
    as_said(run_block(language, code, env, directory), code, line)


def test_examples_are_there():
    languages = [language for language, _, _ in blocks(README)]
    assert set(languages) == {"sh", "python", "c"} and len(languages) >= 6
    assert not blocks(ARCHITECTURE), "examples are in README.md, where they are run"


# ---- running it for real ----


def plain_environment(**more):
    return dict({k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}, NO_COLOR="1", **more)


class Running:
    """A command that stays; it has a process group of its own, as at a terminal, and hears Ctrl-C also where these tests do not: in the background of a script."""

    def __init__(self, command, directory, env, log):
        self.log = log
        with open(log, "wb") as out:
            self.process = subprocess.Popen(command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def wait_for(self, text):
        until = time.monotonic() + START_SECONDS
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < until, f"no {text!r} in: {self.log.read_text()}"
            time.sleep(0.05)

    def end(self, number):
        """Its exit code after that signal to the group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.process.wait(START_SECONDS)


SCP = """#!/bin/sh
for to; do :; done
for from; do case $from in *:*) cp "$SERVER/${from#*:}" "$to";; esac; done
"""


class Machine:
    """A folder in the place of a machine."""

    def __init__(self, directory, server, page):
        self.directory, self.page, self.stays = directory, page, []
        checkout, tools, data = directory / "tandem", directory / "tools", directory / "var"
        for folder in (checkout / "build", tools):
            folder.mkdir(parents=True)
        (checkout / "deploy").symlink_to(ROOT / "deploy")
        (checkout / "build/release").symlink_to(BIN.parent)
        (tools / "scp").write_text(SCP)
        (tools / "scp").chmod(0o755)
        # Root's data would be where a program of this machine may have its own.
        self.env = plain_environment(HOME=str(directory), DESTDIR=str(directory / "root"), MODEL=MODEL, SERVER=str(server),
                                     PATH=f"{directory}/root/usr/local/bin:{tools}:{os.environ['PATH']}", TANDEM_EDGE_DATA=str(data / "edge"),
                                     TANDEM_CLOUD_STORE=str(data / "cloud"), TANDEM_CLOUD_STORE_KEY_FILE=str(data / "store.key"), TANDEM_CLOUD_TOKENS_FILE=str(data / "tokens"))
        data.mkdir()
        for name, option in (("8443", "TANDEM_CLOUD_LISTEN_PORT"), ("9443", "TANDEM_CLOUD_ADMIN_PORT"), ("8081", "TANDEM_EDGE_LISTEN_PORT")):
            self.env[option] = page[name]
        self.env["TANDEM_CHAT_URL"] = f"http://127.0.0.1:{page['8081']}"

    def run(self, code, stays, line):
        for name, here in self.page.items():
            code = re.sub(rf"\b{re.escape(name)}\b", here, code)
        command, checkout = ["bash", "-euo", "pipefail", "-c", ("exec " if stays else "") + code], self.directory / "tandem"
        if stays:
            self.stays.append(Running(command, checkout, self.env, self.directory / f"{line}.log"))
            for text in EXPECTED.findall(code):
                self.stays[-1].wait_for(text)
            return
        as_said(subprocess.run(command, cwd=checkout, env=self.env, capture_output=True, text=True, timeout=600), code, line)


def test_running_it_for_real(tmp_path):
    if not (BIN.parent / "cmake_install.cmake").exists():
        pytest.skip("TANDEM_BIN is in no build folder that could be installed from")
    text = README.read_text()
    page = {"cloud.example": "localhost", **{port: str(free_port()) for port in ("8443", "9443", "8081")}}
    machines = {name: Machine(tmp_path / name, tmp_path / "server", page) for name in ("server", "device")}
    blocks_run = 0
    try:
        for m in MACHINE_BLOCK.finditer(text):
            words, line = m.group(1).split(), text[:m.start()].count("\n") + 1
            for name in words:
                if name in machines:
                    machines[name].run(m.group(2), "stays" in words, line)
                    blocks_run += 1
        for name in ("device", "server"):
            assert [program.end(signal.SIGTERM) for program in machines[name].stays] == [0], "SIGTERM ends both in good order"
    finally:
        for program in [p for m in machines.values() for p in m.stays]:
            program.end(signal.SIGKILL)
    assert blocks_run >= 8
    installed = tmp_path / "server/root/usr/local"
    assert all((installed / name).exists() for name in ("lib/libtandem.so", "include/tandem.h")), "what the library's section says"


# ---- the quickstart's pair ----


@pytest.fixture
def quickstart(tmp_path):
    """A checkout whose programs are built; what quickstart.sh would install, build and fetch is there."""
    root, tools = tmp_path / "checkout", tmp_path / "tools"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    (root / "build/release/bin").mkdir(parents=True)
    for program in ("tandem", "tandem-edge", "tandem-cloud"):
        shutil.copy(BIN / program, root / "build/release/bin")
    tools.mkdir()
    for tool in (root / "deploy/deps.sh", tools / "cmake"):
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    return root, plain_environment(PATH=f"{tools}:{os.environ['PATH']}", HOME=str(tmp_path))


def serve(quickstart, log):
    root, env = quickstart
    return Running(["./deploy/quickstart.sh", "--serve", "--model", MODEL], root, env, log)


def programs_of(root):
    """Processes that run from this folder."""
    found = []
    for exe in pathlib.Path("/proc").glob("[0-9]*/exe"):
        try:
            found += [exe.parent.name] if os.readlink(exe).startswith(str(root)) else []
        except OSError:
            pass
    return found


def test_two_commands(quickstart, tmp_path):
    root, env = quickstart
    page = README.read_text()
    assert "./deploy/quickstart.sh --serve " in page and "build/release/bin/tandem chat " in page
    first = serve(quickstart, tmp_path / "first.log")
    second = None
    try:
        first.wait_for("Ctrl-C")
        first.wait_for("build/serve/env\n")
        said = first.log.read_text()
        chat = re.search(r"^ +(build/release/bin/tandem chat.*)$", said, re.M).group(1)
        ask = [*shlex.split(chat), "Name two rivers."]
        assert subprocess.run(ask, cwd=root, env=env, capture_output=True, timeout=600).returncode == 0
        base = re.search(r"(http://127\.0\.0\.1:\d+/v1) ", said).group(1)
        asked = subprocess.run(["bash", "-ec", f'. build/serve/env; [ "$EDGE/v1" = {base} ]; curl -sf {base}/models; tandem conv ls'], cwd=root, env=env, capture_output=True, text=True, timeout=600)
        assert asked.returncode == 0 and '"object":"list"' in asked.stdout and "conv-" in asked.stdout, asked
        again = subprocess.run(["./deploy/quickstart.sh", "--serve", "--model", MODEL], cwd=root, env=env, capture_output=True, text=True, timeout=600)
        assert again.returncode == 1 and "running already" in again.stderr, again
        assert len(programs_of(root)) == 2
        assert first.end(signal.SIGINT) == 0, first.log.read_text()  # Ctrl-C
        assert programs_of(root) == []
        second = serve(quickstart, tmp_path / "second.log")
        second.wait_for("build/serve/env\n")
        listed = subprocess.run(["bash", "-ec", ". build/serve/env; tandem conv ls"], cwd=root, env=env, capture_output=True, text=True, timeout=600)
        assert "conv-" in listed.stdout, "what was said is there the next time"
        subprocess.run(["./deploy/quickstart.sh", "--stop"], cwd=root, env=env, check=True, capture_output=True, timeout=600)
        assert second.process.wait(START_SECONDS) == 0, second.log.read_text()
        assert programs_of(root) == []
    finally:
        for running in (first, second):
            if running:
                running.end(signal.SIGKILL)
        for pid in programs_of(root):
            os.kill(int(pid), signal.SIGKILL)


# ---- tables of flags ----


def help_rows(program):
    """The options of --help as rows of a table: | `--flag VALUE` | what it says |"""
    text = subprocess.run([BIN / program, "--help"], check=True, capture_output=True, text=True).stdout
    options, rows = text.split("\nOptions:\n")[1].split("\n\n")[0], []
    for line in options.splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            flag, _, what = line.strip().partition("  ")
            rows.append([flag, what.strip()])
        else:
            rows[-1][1] = (rows[-1][1] + " " + line.strip()).strip()
    return [f"| `{flag}` | {what} |" for flag, what in rows]


def table(program):
    """Begin and end of the table behind the marker <!-- flags: PROGRAM --> in README.md, as offsets."""
    text = README.read_text()
    begin = text.index(f"<!-- flags: {program} -->")
    begin = text.index("|---|---|\n", begin) + len("|---|---|\n")
    return begin, max(begin, text.index("\n\n", begin - 1))


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags(program):
    begin, end = table(program)
    assert README.read_text()[begin:end].splitlines() == help_rows(program), "python test_docs.py --write brings the table up to date"


def write_tables():
    for program in PROGRAMS:
        begin, end = table(program)
        text = README.read_text()
        README.write_text(text[:begin] + "\n".join(help_rows(program)) + text[end:])


# ---- names ----


def anchors(page):
    """Headings as links name them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [README, ARCHITECTURE, ROOT / "tests/bench/RESULTS.md"], ids=lambda p: p.name)
def test_links(page):
    text = page.read_text()
    for target, place in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text) + re.findall(r'(?:src|href)="([^"#]+)(#?)"', text):
        if "://" not in target:
            there = (page.parent / target) if target else page
            assert there.exists(), target
            assert place in ("", "#") or place in anchors(there), f"no heading #{place} in {there.name}"


def named(text):
    """What stands in backticks outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def test_files_and_tests_exist():
    """`folder/file` exists; `tests/…/file:name` and `tests/…/file::name` also have a function of that name."""
    checked, missing = 0, []
    for word in named(ARCHITECTURE.read_text()) + named((ROOT / "tests/REPORTED.md").read_text()):
        m = re.fullmatch(r"((?:shared|kernels|protocol|store|edge|cloud|cli|tests|deploy)/[\w./-]+?)(?:::?(\w+))?", word)
        if not m:
            continue
        path, name = ROOT / m.group(1), m.group(2)
        if not path.exists() or (name and not re.search(rf"\b{name}\(", path.read_text())):
            missing.append(word)
        checked += name is not None
    assert not missing
    assert checked >= 30, "the table of failures names its tests"


def test_failures_name_tests():
    text = ARCHITECTURE.read_text()
    rows = re.search(r"^## .*Failures.*?^\|---.*?\n(.*?)\n\n", text, re.M | re.S).group(1).splitlines()
    assert len(rows) >= 15
    for row in rows:
        assert re.search(r"`tests/[\w./]+::?\w+`", row.split("|")[-2]), f"no test named: {row}"


def test_constants_exist():
    """A name in capitals with an underscore is a constant of the code, or a variable that a script or a program reads."""
    sources = "\n".join(p.read_text(errors="replace") for folder in ("shared", "kernels", "protocol", "store", "edge", "cloud", "cli", "deploy", "tests/e2e")
                        for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".c", ".sh", ".py", ".md", ".cmake"))
    words = {word for word in named(ARCHITECTURE.read_text()) if re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", word)}
    assert {word for word in words if not re.search(rf"\b{word}\b", sources)} == set()


def test_limits_are_the_codes():
    """Rows `| what | NAME | value |` of ARCHITECTURE.md: value is what the code says."""
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    sources = "\n".join(p.read_text() for folder in ("kernels", "protocol", "store", "edge", "cloud") for p in (ROOT / folder).rglob("*.[ch]"))
    rows = re.findall(r"^\|[^|\n]*\| `([A-Z][A-Z0-9_]+)` \| ([\d,]+) ?(KiB|MiB|GiB|)[^|\n]*\|$", ARCHITECTURE.read_text(), re.M)
    assert len(rows) >= 15
    for name, number, unit in rows:
        value = re.search(rf"^#define {name}\s+(?:\\\n\s*)?(.+?)\s*(?:/\*.*)?$", sources, re.M)
        assert value, name
        expression = re.sub(r"(\d)(?:u|ull)\b", r"\1", value.group(1))
        assert re.fullmatch(r"[\d\s()<*]+", expression), (name, expression)
        assert eval(expression) == int(number.replace(",", "")) * units[unit], name


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    write_tables()
