"""A disk of any speed under a running node: a stored prompt brings the same reply, whether it is read, computed, or both."""
import pathlib
import subprocess

import pytest

from conftest import client_of
from harness import Cloud

TEXT = " ".join(f"On day {i} the fox went {i * 7 % 40} steps to the well." for i in range(53))
RATES = [4, 40, 0]  # MB/s; 0: as fast as it is


@pytest.fixture(scope="module")
def slow_disk(tmp_path_factory):
    library = tmp_path_factory.mktemp("slow") / "slow_disk.so"
    source = pathlib.Path(__file__).resolve().parents[1] / "bench/slow_disk.c"
    subprocess.run(["cc", "-std=c17", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def ask(cloud, text, cache=True):
    reply = client_of(cloud, cloud.token, cloud.ca).chat.completions.create(
        model="default", messages=[{"role": "user", "content": text}], temperature=0.8, seed=11, max_tokens=16,
        extra_body={"ignore_eos": True, "fidelity": "exact", "cache": cache})
    return reply.choices[0].message.content, reply.usage


def test_same_reply_at_any_speed(tmp_path, slow_disk):
    rate = tmp_path / "rate"
    rate.write_text("0")
    cloud = Cloud(tmp_path / "c", extra=["--store-ram", "0", "--pages", "16"])  # no room for two prompts
    cloud.env.update(LD_PRELOAD=str(slow_disk), TANDEM_SLOW_DISK=str(rate))
    cloud.token = cloud.new_token()
    try:
        cloud.start()
        want, usage = ask(cloud, TEXT)
        assert 11 * 64 < usage.prompt_tokens < 15 * 64
        assert cloud.stop() == 0
        read = 0
        for mb in RATES:
            rate.write_text(str(mb * 1000000))
            cloud.start()
            for i in range(2 if mb else 8):
                ask(cloud, f"{i} {mb} other words. " + TEXT, cache=False)
                got, usage = ask(cloud, TEXT)
                assert got == want, f"{mb} MB/s, time {i}"
                read += usage.prompt_tokens_details.cached_tokens
                if i and read:
                    break
            assert cloud.stop() == 0
        assert read > 0  # how much is read is a matter of time
    finally:
        cloud.kill()
