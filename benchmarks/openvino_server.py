"""OpenVINO GenAI behind OpenAI's completions, as thin as a comparison needs: greedy streams that never end early.

In an environment of its own:

    pip install torch==2.13.0 openvino-genai optimum-intel fastapi uvicorn && pip uninstall torchvision
    optimum-cli export openvino --model MODEL --task text-generation-with-past --weight-format fp16 EXPORTED
    python benchmarks/openvino_server.py EXPORTED --port 9000

Then `against_peers.py --other openvino=http://127.0.0.1:9000,any`.
"""

import argparse
import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai as genai
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse


class Pipeline:
    """The continuous-batching pipeline and the thread that steps it."""

    def __init__(self, folder: str) -> None:
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = 2  # GiB
        scheduling.max_num_batched_tokens = 512
        scheduling.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            folder, scheduling, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._running: list[tuple[Any, asyncio.AbstractEventLoop, asyncio.Queue[str | None]]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    async def stream(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        """The text of each token as it comes."""
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        told: asyncio.Queue[str | None] = asyncio.Queue()
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).input_ids
        with self._changed:
            handle = self._pipeline.add_request(next(self._ids), ids, config)
            self._running.append((handle, asyncio.get_running_loop(), told))
            self._changed.notify()
        while (text := await told.get()) is not None:
            yield text

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                self._pipeline.step()
                self._running = [entry for entry in self._running if not self._tell(*entry)]

    def _tell(self, handle: Any, loop: asyncio.AbstractEventLoop, told: asyncio.Queue[str | None]) -> bool:
        """Whether that was all."""
        while handle.can_read():
            for output in handle.read().values():
                for token in output.generated_ids:
                    loop.call_soon_threadsafe(told.put_nowait, self._tokenizer.decode([token]) or " ")
        if ended := handle.get_status() != genai.GenerationStatus.RUNNING:
            loop.call_soon_threadsafe(told.put_nowait, None)
        return bool(ended)


def create_app(pipeline: Pipeline) -> FastAPI:
    """The one route, and one to ask whether it is there."""
    app = FastAPI()

    @app.get("/health")
    def health() -> None: ...

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            async for text in pipeline.stream(body["prompt"], body["max_tokens"]):
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="OpenVINO GenAI behind OpenAI's completions.")
    parser.add_argument("folder", help="the exported model")
    parser.add_argument("--port", type=int, default=9000)
    options = parser.parse_args()
    uvicorn.run(create_app(Pipeline(options.folder)), port=options.port, log_level="warning")
