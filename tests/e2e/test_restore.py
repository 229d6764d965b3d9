"""The second turn of a 2,000-token conversation computes and sends its new tokens only, whichever program was restarted; when the cloud has lost its store,
what it had comes back from the device, which sends it instead of letting it be computed."""
import shutil
import subprocess

import pytest

from conftest import client_of
from harness import BIN, Cloud, Edge, MODEL, wait_until

NOTES = "Here are my notes. " + " ".join(f"On day {i} the fox went {i * 7 % 40} steps to the well and drank." for i in range(125))
EXACT = {"ignore_eos": True, "fidelity": "exact", "timings": True}
ROW, KV_LAYER = 576 * 4, 2 * 192 * 2  # bytes of a token: f32 row, K and V of a layer in f16
PACE = "TANDEM_PACED_LAYER_US"
FETCHED = "tandem_edge_kv_fetched_total"
WRITTEN, COMPUTED = "tandem_edge_kv_disk_written_total", "tandem_edge_prefill_tokens_total"


def new_edge(path, cloud, base=None, pace=None):
    """An edge, perhaps with a copy of another's folder: what a restart finds."""
    if base:
        shutil.copytree(base.dir / "data", path / "data")
    edge = Edge(path, cloud, cloud.token, 8, model=getattr(cloud, "device_model", MODEL), extra=["--codec", "l0", "--hidden", "f32", "--kv-whole", "--kv-memory", "512M"])
    if pace:
        edge.env[PACE] = pace
    return edge.start()


def ask(edge, text, conversation=None, **extra):
    body = {**EXACT, **extra, **({"conversation": conversation} if conversation else {})}
    r = client_of(edge).chat.completions.with_raw_response.create(model="default", messages=[{"role": "user", "content": text}], temperature=0.8, seed=11,
                                                                  max_tokens=24, extra_body=body)
    return r.headers["x-conversation-id"], r.parse()


def settle(edge, blocks):
    """So many have been written to its disk."""
    assert wait_until(lambda: edge.metrics().get(WRITTEN, 0) >= blocks), f"{edge.metrics().get(WRITTEN, 0)} of {blocks} blocks were written"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A cloud and, at rest, a device after the first turn, all of which is on the disks of both, at the device in all layers."""
    path = tmp_path_factory.mktemp("first")
    cloud = Cloud(path / "c")
    cloud.token = cloud.new_token()
    cloud.start()
    edge = new_edge(path / "e", cloud)
    conversation, reply = ask(edge, NOTES)
    total = reply.usage.total_tokens
    assert total > 2000
    settle(edge, reply.usage.prompt_tokens // 64 + (total - 1) // 64)  # those of the prompt twice: as deep as was computed for the reply, and whole
    assert edge.stop() == 0
    cloud.settle((total - 1) // 64)
    yield cloud, edge, conversation, total
    cloud.kill()


def without_store(cloud, path):
    """The same cloud once more, which has lost what it had stored, and has better things to do than to compute."""
    shutil.copytree(cloud.dir, path, ignore=shutil.ignore_patterns("store"))
    other = Cloud(path)
    other.token = cloud.token
    other.env[PACE] = "150"
    return other.start()


def second_turn(tmp_path, world, name, question, warm=None, pace=None):
    """The turn, and what one that takes nothing from anywhere says."""
    cloud, first, conversation, _ = world
    edge, control = new_edge(tmp_path / name, cloud, first, pace), new_edge(tmp_path / (name + "-control"), cloud, first)
    try:
        if warm:  # both sides know by now what they, and the link, can do
            ask(edge, warm, cache=False)
        before = edge.metrics().get(COMPUTED, 0)
        _, got = ask(edge, question, conversation)
        computed = edge.metrics()[COMPUTED] - before
        _, want = ask(control, question, conversation, cache=False)
        assert got.choices[0].message.content == want.choices[0].message.content
        return got.usage, got.model_extra["timings"], computed
    finally:
        edge.kill()
        control.kill()


def check_new_tokens_only(tmp_path, world, name, question, restarts=False):
    """A disk that answers later than computing takes counts as empty, and what computing takes here is only guessed before anything has been computed: on a busy
    machine such a turn is tried again, then with both slower than any disk. What was not there at all would be written anew."""
    cloud, total = world[0], world[3]
    for attempt in range(10):
        pace = "300" if attempt >= 3 else None
        if restarts or attempt == 3:
            cloud.env.update({PACE: pace} if pace else {})
            assert cloud.stop() == 0
            cloud.start()
        before = cloud.stored()
        usage, timings, computed = second_turn(tmp_path, world, f"{name}{attempt}", f"{attempt}. {question}", warm=NOTES[700:1500] if attempt else None, pace=pace)
        if usage.prompt_tokens_details.cached_tokens == (total - 1) // 64 * 64 and computed <= usage.prompt_tokens - total + 64:
            break
        cloud.settle()
        assert cloud.stored() - before < total // 128, "nothing of the first turn"
    new = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens == (total - 1) // 64 * 64
    assert computed == timings["edge_prefill_tokens"] == timings["cloud_prefill_tokens"] == new
    assert timings["uplink_bytes"] <= new * (ROW + 8 * KV_LAYER) + 4096 * 8
    assert timings["plan"]["restored_tokens"] == 0
    if cloud.env.pop(PACE, None):
        assert cloud.stop() == 0
        cloud.start()


def test_new_tokens_only_after_either_is_restarted(tmp_path, world):
    check_new_tokens_only(tmp_path, world, "edge", "What did the fox do on day nine?")
    check_new_tokens_only(tmp_path, world, "both", "How often did the fox drink?", restarts=True)


def test_a_wiped_cloud_is_restored_from_the_device(tmp_path, world):
    cloud, first, conversation, total = world
    held = (total - 1) // 64 * 64
    for attempt in range(10):  # on a busy machine it may be foretold that computing is sooner all the same
        wiped = without_store(cloud, tmp_path / f"c{attempt}")
        try:
            usage, timings, computed = second_turn(tmp_path, (wiped, first, conversation, total), f"wiped{attempt}", "Where did the fox go?", warm=NOTES[700:3600])
        finally:
            wiped.kill()
        if timings["plan"]["restored_tokens"] == held and computed == usage.prompt_tokens - held:
            break
    new = usage.prompt_tokens - held
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert timings["plan"]["restored_tokens"] == held
    assert computed == timings["edge_prefill_tokens"] == timings["cloud_prefill_tokens"] == new, "nobody computes what is restored"
    assert timings["recomputed_tokens"] == 0
    whole = held * 30 * KV_LAYER
    assert 0.6 * whole < timings["uplink_bytes"] < 1.02 * whole + new * (ROW + 8 * KV_LAYER)


@pytest.fixture
def sliced_world(tmp_path):
    """A device that holds 8 of 30 layers, and has been given the others, sealed, to keep."""
    cloud = Cloud(tmp_path / "c")
    cloud.token, cloud.device_model = cloud.new_token(), tmp_path / "device.gguf"
    cloud.env[PACE] = "200"  # else what it computes may be sooner than what is believed of the link
    subprocess.run([BIN / "tandem", "model", "slice", "--layers", "0:8", MODEL, cloud.device_model], check=True, capture_output=True)
    cloud.start()
    edge = new_edge(tmp_path / "first", cloud)
    conversation, reply = ask(edge, NOTES[:1200])
    total = reply.usage.total_tokens
    blocks = (total - 1) // 64
    assert blocks > 4
    assert wait_until(lambda: edge.metrics().get(FETCHED, 0) == blocks), edge.log()[-2000:]
    settle(edge, 2 * blocks)  # and its own
    assert edge.stop() == 0
    yield cloud, edge, conversation, total
    cloud.kill()


def wipe(cloud):
    cloud.kill()
    shutil.rmtree(cloud.store)


def test_a_slice_gives_back_what_the_cloud_sealed(tmp_path, sliced_world):
    """Both have been started anew, the cloud without a store. It takes what it finds its own seal on, and says the same as without the loss; with another key there is nothing to
    give back."""
    cloud, first, conversation, total = sliced_world
    held = (total - 1) // 64 * 64
    for attempt in range(10):
        wipe(cloud)
        cloud.start()
        usage, timings, computed = second_turn(tmp_path, sliced_world, f"sealed{attempt}", "Where did the fox go?", warm=NOTES[700:3600])
        if timings["plan"]["restored_tokens"] == held and computed == usage.prompt_tokens - held:
            break
    new = usage.prompt_tokens - held
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert timings["plan"]["restored_tokens"] == held
    assert computed == timings["edge_prefill_tokens"] == timings["cloud_prefill_tokens"] == new
    assert timings["recomputed_tokens"] == 0, "all that came back was taken"
    whole = held * 30 * KV_LAYER
    assert 0.6 * whole < timings["uplink_bytes"] < 1.03 * whole + new * (ROW + 8 * KV_LAYER)

    wipe(cloud)
    (cloud.dir / "store.key").unlink()
    cloud.start()
    edge = new_edge(tmp_path / "lost", cloud, first)
    ask(edge, NOTES[700:1900], cache=False)
    _, reply = ask(edge, "Where did the fox go?", conversation)
    edge.kill()
    assert reply.usage.prompt_tokens == reply.model_extra["timings"]["cloud_prefill_tokens"] == usage.prompt_tokens
    assert reply.model_extra["timings"]["plan"]["restored_tokens"] == 0
