"""Once over the embedded model, as `ropewalk serve --otel` assembles it: long enough a request to be re-rotated."""

import pytest

from tests.service.tracing.recording import Recording, attributes, seconds
from tests.serving import real_server


def test_a_request_that_grows_is_traced_from_end_to_end() -> None:
    prepared = real_server(native_length=64, max_model_len=256, kv_cache_memory="16MiB", device="cpu")
    recording = Recording(prepared.inspected.name)
    recording.attach(prepared)
    with prepared as server:
        body = {"prompt": "Count: one two three", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/generate", json=body).json()
        told = attributes(recording.request())
        names = [stage.name for stage in recording.stages()]
    assert answer["rope"]["rerotations"] >= 1
    assert told["ropewalk.rope.rerotations"] == answer["rope"]["rerotations"] == names.count("rerotate")
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 80
    assert told["gen_ai.request.model"] == prepared.inspected.name
    (decode,) = [stage for stage in recording.stages() if stage.name == "decode"]
    assert seconds(decode) == pytest.approx(answer["timing"]["decode_seconds"], rel=0.01)
    (per_token,) = recording.points("gen_ai.server.time_per_output_token")
    assert per_token.sum == pytest.approx(answer["timing"]["decode_seconds"] / 79, rel=1e-6)
