"""Fixtures: one cloud and some edges for a module of tests; tests that kill or fill use their own."""
import ssl

import httpx
import openai
import pytest

from harness import Cloud, Edge


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    c = Cloud(tmp_path_factory.mktemp("cloud"))
    c.token = c.new_token()
    c.start()
    yield c
    assert c.stop() == 0, c.log()[-2000:]


@pytest.fixture(scope="module")
def edge(tmp_path_factory, cloud):
    e = Edge(tmp_path_factory.mktemp("edge"), cloud, cloud.token).start()
    yield e
    assert e.stop() == 0, e.log()[-2000:]


def client_of(program, key="unused", ca=None):
    """The plain OpenAI client; nothing about it knows Tandem."""
    verify = ssl.create_default_context(cafile=ca) if ca else True
    http = httpx.Client(verify=verify, timeout=600, trust_env=False)
    return openai.OpenAI(base_url=program.url + "/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture
def edge_client(edge):
    return client_of(edge)


@pytest.fixture
def cloud_client(cloud):
    return client_of(cloud, cloud.token, cloud.ca)


@pytest.fixture
def world(request, tmp_path):
    """The module's own World, a harness.Stack."""
    w = request.module.World(tmp_path)
    yield w
    w.close()
