"""What README.md and ARCHITECTURE.md say is true.

Examples. A fenced block whose first line is ```sh test, ```python test or ```c test is run against a cloud and an edge, in the order of the page, in one
directory for the page. The environment names the two: EDGE and CLOUD (addresses), CA and TOKEN (how to come in to the cloud), MODEL (the file), CLOUD_HOST
(host:port for edges), ADMIN and STORE_KEY (the node's admin listener, and the file with its master key), PREFIX (where tandem.h and libtandem are). A comment that ends in `=> TEXT` says that TEXT appears in what the block prints.

Also: the tables of flags are those of --help, links lead somewhere, and every file, test and constant that ARCHITECTURE.md names exists.

    python test_docs.py --write      brings the tables of flags in README.md up to date (TANDEM_BIN and TANDEM_MODEL set, as run.sh does)
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from harness import BIN, MODEL, ROOT

README, ARCHITECTURE = ROOT / "README.md", ROOT / "ARCHITECTURE.md"
PROGRAMS = ("tandem-edge", "tandem-cloud")
BLOCK = re.compile(r"^```(sh|python|c) test\n(.*?)^```$", re.M | re.S)
EXPECTED = re.compile(r"=> (.+?)(?: \*/)?$", re.M)


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
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("language,code,line", blocks(README), ids=[f"README.md:{line}" for _, _, line in blocks(README)])
def test_readme_example(surroundings, language, code, line):
    env, directory = surroundings
    r = run_block(language, code, env, directory)
    said = r.stdout + r.stderr
    assert r.returncode == 0, f"README.md:{line}: {said}"
    for text in EXPECTED.findall(code):
        assert text in said, f"README.md:{line}: no {text!r} in: {said}"


def test_examples_are_there():
    languages = [language for language, _, _ in blocks(README)]
    assert set(languages) == {"sh", "python", "c"} and len(languages) >= 6
    assert not blocks(ARCHITECTURE), "examples are in README.md, where they are run"


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
    shown = [row.split("|")[1].strip() for row in README.read_text()[begin:end].splitlines()]
    assert shown == [row.split("|")[1].strip() for row in help_rows(program)], "python test_docs.py --write brings the table up to date"


def write_tables():
    for program in PROGRAMS:
        begin, end = table(program)
        text = README.read_text()
        README.write_text(text[:begin] + "\n".join(help_rows(program)) + text[end:])


# ---- names ----


@pytest.mark.parametrize("page", [README, ARCHITECTURE], ids=lambda p: p.name)
def test_links(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|href)="([^"#]+)"', text):
        if "://" not in target:
            assert (ROOT / target).exists(), target


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
