"""Sixteen streams at once through edge and cloud: each reply as it is alone. A client that leaves stops its generation and frees its pages."""
import concurrent.futures
import time

from conftest import client_of
from harness import wait_until

STREAMS = 16


def ask(client, i, cache=True):
    chunks = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": f"Tell me about the number {i} and about {'rivers' if i % 2 else 'hills'}." + " Go on." * i}],
        temperature=0.9, seed=100 + i, max_tokens=24, stream=True, extra_body={"cache": cache, "fidelity": "exact"})
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_sixteen_streams(tmp_path, cloud):
    from harness import Edge
    e = Edge(tmp_path, cloud, cloud.new_token(principal="many"), 8, extra=["--codec", "l0", "--hidden", "f32"]).start()
    try:
        client = client_of(e)
        alone = [ask(client, i, cache=False) for i in range(STREAMS)]
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            together = list(pool.map(lambda i: ask(client_of(e), i), range(STREAMS)))
        assert together == alone
    finally:
        assert e.stop() == 0


def test_leaving_frees_pages(cloud, edge):
    for client in (client_of(edge), client_of(cloud, cloud.token, cloud.ca)):
        assert wait_until(lambda: cloud.metrics()["tandem_requests_running"] == 0)
        before = cloud.metrics()["tandem_generated_tokens_total"]
        stream = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Count from one to a thousand."}],
                                                temperature=1, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
        for _ in range(4):
            next(stream)
        assert wait_until(lambda: cloud.metrics()["tandem_requests_running"] == 1)
        stream.close()
        client.close()
        assert wait_until(lambda: cloud.metrics()["tandem_requests_running"] == 0)
        stopped = cloud.metrics()
        time.sleep(0.5)
        later = cloud.metrics()
        assert later["tandem_generated_tokens_total"] == stopped["tandem_generated_tokens_total"] < before + 4000
        assert later.get("tandem_generations_parked", 0) == 0
