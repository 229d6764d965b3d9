"""Files that do not belong together: what a device makes without its cloud must be what that cloud would have said."""
import pathlib
import shutil

import pytest

from conftest import client_of
from harness import MODEL, Cloud, Edge, wait_until
from test_security import with_other_weights

HELLO = [{"role": "user", "content": "Say hello."}]


def test_a_device_with_another_model_does_not_go_on_alone(tmp_path):
    cloud = Cloud(tmp_path / "c")
    model = tmp_path / "model.gguf"
    shutil.copyfile(MODEL, model)
    edge = Edge(tmp_path / "e", cloud, cloud.new_token(), "auto", model=model, extra=["--offline", "continue", "--cloud-timeout", "2"])

    def say():
        return client_of(edge).chat.completions.create(model="default", messages=HELLO, max_tokens=4, extra_body={"ignore_eos": True, "timings": True})

    try:
        cloud.start()
        edge.start()
        assert wait_until(lambda: "connected to" in edge.log())
        cloud.kill()
        assert say().model_extra["timings"]["offline"]["tokens"] == 4, "control"
        edge.stop()
        model.write_bytes(with_other_weights(model.read_bytes()))
        edge.start(wait=False)
        assert wait_until(lambda: "listening on" in pathlib.Path(edge.log_path).read_text().rsplit("stopped", 1)[-1]), edge.log()
        with pytest.raises(Exception, match="identity is not in its data folder"):
            say()
    finally:
        edge.kill()
        cloud.kill()
