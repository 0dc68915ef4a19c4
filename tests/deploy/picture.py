"""A picture of the dashboard for the documentation: `python -m tests.deploy.picture`.

A real Prometheus (Debian: apt install prometheus) scrapes the default model's server every second for four minutes,
while callers chat, read long texts, write until their plans grow, come all at once, leave early and make mistakes. The
picture is of what the dashboard's own queries answer. Takes matplotlib (extra `eval`).
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from tests.deploy.drawing import draw_dashboard
from tests.deploy.panels import read_dashboard, unexpectedly_empty
from tests.deploy.prometheus import scraping
from tests.reference.text import real_text
from tests.serving import real_server

FILE = Path(__file__).parents[2] / "docs" / "images" / "dashboard.png"
SECONDS = 240
SECONDS_TO_ANSWER = 600.0
"""A guard against hanging."""
SECONDS_BETWEEN_SCRAPES, STEP, RATE_INTERVAL = 1, 2, "15s"
SETTINGS: dict[str, Any] = {
    "native_length": 256,
    "max_model_len": 1024,
    "kv_cache_memory": "48MiB",  # 2,100 tokens: some have to make room
    "max_running": 8,
    "max_queued": 8,
    "max_batch_tokens": 256,
    "prefix_reuse": "rerotate",
}
NOTE = (
    "Four minutes of mixed load on the default model, its native length set to 256 tokens. "
    f"Scraped every second, rates over {RATE_INTERVAL}."
)
QUESTIONS = ("Why is the sky blue?", "Name a river.", "What is a rope made of?", "Tell me of the sea.", "And then?")
TEXT = real_text()


class Callers:
    """Those who use the server, each sending one request after the other until a time of the event loop."""

    def __init__(self, client: httpx.AsyncClient, end: float) -> None:
        self._client = client
        self._end = end
        self._dice = random.Random(0)

    async def all(self) -> None:
        """Run them all."""
        loads = [(self.chat, 1.0), (self.chat, 3.0), (self.read, 12.0), (self.write, 5.0)]
        loads += [(self.rush, 55.0), (self.leave, 9.0), (self.err, 11.0)]
        await asyncio.gather(*(self._repeat(load, pause) for load, pause in loads))

    async def _repeat(self, load: Callable[[], Awaitable[None]], pause: float) -> None:
        """A load again and again, with a pause (seconds) before each."""
        while (now := asyncio.get_running_loop().time()) < self._end:
            await asyncio.sleep(min(pause * self._dice.uniform(0.5, 1.5), self._end - now))
            await load()

    async def chat(self) -> None:
        """A conversation of a few turns, which may cross the native length."""
        messages: list[dict[str, str]] = []
        for _ in range(self._dice.randint(2, 7)):
            messages.append({"role": "user", "content": self._dice.choice(QUESTIONS)})
            answer = await self._post("/v1/chat/completions", {"messages": messages, "max_tokens": 50})
            if "choices" not in answer:
                return
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async def read(self) -> None:
        """A text beyond the native length; some begin alike."""
        start, length = 2_000 * self._dice.randrange(3), self._dice.randint(1_200, 2_500)
        await self._post("/generate", {"prompt": TEXT[start : start + length], "max_tokens": 60})

    async def write(self) -> None:
        """A prompt within the native length whose answer outgrows it."""
        body = {"prompt": TEXT[:800], "max_tokens": self._dice.randint(100, 500), "ignore_eos": True}
        await self._post("/generate", body)

    async def rush(self) -> None:
        """More at once than run and wait."""
        body = {"prompt": "The sea at night", "max_tokens": 24, "ignore_eos": True}
        await asyncio.gather(*(self._post("/generate", body) for _ in range(20)))

    async def leave(self) -> None:
        """A stream whose reader is soon gone."""
        body = {"prompt": "A long story:", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with self._client.stream("POST", "/generate", json=body) as response:
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    async for _ in response.aiter_lines():
                        pass

    async def err(self) -> None:
        """A request that cannot be served."""
        mistakes = ({"max_tokens": -1}, {"max_tokens": 100_000}, {"model": "another"})
        await self._post("/generate", {"prompt": "A", **self._dice.choice(mistakes)})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._client.post(path, json=body)).json()
        return answer


async def load(url: str) -> float:
    """Keep a server busy. Returns when the load began to end, in seconds since 1970."""
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS_TO_ANSWER, trust_env=False) as client:
        callers = Callers(client, asyncio.get_running_loop().time() + SECONDS)
        under_way = asyncio.create_task(callers.all())
        await asyncio.sleep(SECONDS)
        end = time.time()
        await under_way
    return end


def main() -> None:
    """Write dashboard.png, or end with status 1, naming panels that show nothing."""
    with TemporaryDirectory() as folder, real_server(**SETTINGS) as server:
        with scraping(server.url, Path(folder), SECONDS_BETWEEN_SCRAPES) as prometheus:
            end = asyncio.run(load(server.url))
            times = [end - SECONDS + second for second in range(0, SECONDS + 1, STEP)]
            panels = read_dashboard(prometheus, times, RATE_INTERVAL)
        server.wait_until_idle()
    if missing := unexpectedly_empty(panels, with_a_gpu=torch.cuda.is_available()):
        raise SystemExit(f"no data in: {', '.join(sorted(missing))}")
    draw_dashboard(panels, times, NOTE, FILE)


if __name__ == "__main__":
    main()
