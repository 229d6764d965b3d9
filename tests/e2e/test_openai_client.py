"""The plain OpenAI client, unchanged, against the edge and against the cloud."""
import openai
import pytest

from conftest import client_of

QUESTION = [{"role": "user", "content": "Write a short sentence about the sea."}]


@pytest.fixture(params=["edge", "cloud"])
def client(request, edge_client, cloud_client):
    return {"edge": edge_client, "cloud": cloud_client}[request.param]


def model_of(client):
    return client.models.list().data[0].id


def test_chat(client):
    r = client.chat.completions.create(model=model_of(client), messages=QUESTION, temperature=0, max_tokens=12)
    assert r.object == "chat.completion" and r.choices[0].message.role == "assistant"
    assert r.choices[0].message.content and r.choices[0].finish_reason in ("stop", "length")
    assert r.usage.completion_tokens <= 12
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def test_stream_equals_whole(client):
    ask = dict(model=model_of(client), messages=QUESTION, temperature=0.8, seed=11, max_tokens=24)
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])


def test_completions(client):
    r = client.completions.create(model=model_of(client), prompt="The capital of France is", temperature=0, max_tokens=4)
    assert r.object == "text_completion" and "Paris" in r.choices[0].text


def test_stop_string(client):
    ask = dict(model=model_of(client), messages=[{"role": "user", "content": "Count: 1, 2, 3"}], temperature=0, max_tokens=40)
    free = client.chat.completions.create(**ask).choices[0].message.content
    words = free.split()
    assert len(words) > 4
    stop = words[3]
    r = client.chat.completions.create(**ask, stop=[stop])
    assert r.choices[0].finish_reason == "stop"
    assert r.choices[0].message.content == free[: free.index(stop)]


def test_seed(client):
    ask = dict(model=model_of(client), messages=QUESTION, temperature=1.2, max_tokens=24)
    first, again, other = (client.chat.completions.create(**ask, seed=s).choices[0].message.content for s in (5, 5, 6))
    assert first == again and first != other


def test_logprobs(client):
    r = client.chat.completions.create(model=model_of(client), messages=QUESTION, temperature=0, max_tokens=3, logprobs=True, top_logprobs=4)
    content = r.choices[0].logprobs.content
    assert len(content) == r.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 4
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-4)  # greedy takes the likeliest


def test_errors(client):
    name = model_of(client)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=name, messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"


def test_wrong_key(cloud):
    with pytest.raises(openai.AuthenticationError):
        client_of(cloud, "not-a-token", cloud.ca).models.list()
