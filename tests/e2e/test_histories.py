"""A stateless client that re-sends its whole history is recognised: ten turns, personal data in the text, temperature 1."""
from conftest import client_of


def test_ten_turns(edge, cloud):
    for client in (client_of(edge), client_of(cloud, cloud.token, cloud.ca)):
        messages = [{"role": "system", "content": "You help people plan journeys."}]
        previous = 0
        for turn in range(10):
            messages.append({"role": "user", "content": f"Turn {turn}: I am anna{turn % 3}@example.com, my phone is +49 30 901820, plan a day in city number {turn}, please."})
            r = client.chat.completions.create(model="default", messages=messages, temperature=1, max_tokens=30)
            cached = r.usage.prompt_tokens_details.cached_tokens
            if turn:
                assert cached >= previous - 64, (turn, cached, previous)
            previous = r.usage.total_tokens
            messages.append({"role": "assistant", "content": r.choices[0].message.content})


def test_edited_history_forks(edge):
    client = client_of(edge)

    def turn(messages):
        r = client.chat.completions.with_raw_response.create(model="default", messages=messages, temperature=0, max_tokens=16)
        return r.headers["x-conversation-id"], r.parse().choices[0].message.content

    messages = [{"role": "user", "content": "Name a colour of the sea at dawn."}]
    first, a = turn(messages)
    messages += [{"role": "assistant", "content": a}, {"role": "user", "content": "And at noon?"}]
    second, b = turn(messages)
    assert second == first
    messages[2] = {"role": "user", "content": "And at night?"}
    third, _ = turn(messages)
    assert third != first
