"""A real HTTP server in a thread, over the fake model of `tests.fakes` or over a real one.

What a test needs to look at is in reach: the scheduler, the pool of pages, and a gate that stops the engine before its
next step, so that no test waits for a length of time. Whoever stops a server learns whether it kept its promises: no
request is left and every page is back.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import httpx
import torch
import uvicorn
from openai import DefaultHttpxClient, OpenAI
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_patches.loading.generation import GenerationDefaults
from service import build
from service.app import create_app
from service.build import InspectedModel, LoadedServer
from service.chat.template import ChatTemplate
from service.core import Sequence
from service.engine.detokenize import text_streams
from service.engine.engine import Engine
from service.engine.grammar import GrammarFactory
from service.engine.thread import EngineThread
from service.metrics import Metrics
from service.scaling.policy import Policy
from service.scheduler.scheduler import Scheduler
from service.settings import Settings
from service.tracing.hook import UNTRACED, Tracing
from tests.fakes import GEOMETRY, VOCABULARY, EngineUnderTest

DEADLINE = 120.0  # seconds; a guard against hanging, never a measure
MODEL = "fake-model"
END_TOKEN, SPECIAL_TOKENS = 0, ("<end>", "<system>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until something holds; fail when it does not come to hold."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE:.0f} s for: {what}"
        time.sleep(0.005)


def byte_tokenizer(special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    """One token for each ASCII character, its code; the first codes are special tokens instead."""
    printable = [number for number in range(256) if 33 <= number <= 126 or 161 <= number <= 172 or number >= 174]
    shifted = [number for number in range(256) if number not in printable]
    letters = {number: chr(number) for number in printable} | {
        number: chr(256 + place) for place, number in enumerate(shifted)
    }
    tokens = {letters[number]: number for number in range(len(special_tokens), VOCABULARY)}
    tokens |= {token: number for number, token in enumerate(special_tokens)}
    backend = Tokenizer(models.BPE(tokens, []))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token=special_tokens[END_TOKEN], chat_template=CHAT_TEMPLATE)


class StepGate:
    """Called before each step of the fake model.

    Attributes:
        fault: raised instead of computing, while it is set.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()
        self._one = threading.Event()

    def __call__(self, number: int, step: Mapping[Sequence, int]) -> None:
        del number, step
        if not self._open.is_set():
            self._reached.set()
            wait_until(lambda: self._open.is_set() or self._one.is_set(), "somebody opens the gate")
            self._one.clear()
        if self.fault is not None:
            raise self.fault

    def open(self) -> None:
        """Let the engine go on."""
        self._open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """No step passes while the block runs."""
        self._reached.clear()
        self._open.clear()
        try:
            yield
        finally:
            self.open()

    def pass_one_step(self) -> None:
        """From before the closed gate, compute one step and come before it again."""
        self._reached.clear()
        self._one.set()
        self.wait_until_reached()

    def wait_until_reached(self) -> None:
        """Wait until the engine stands before the closed gate."""
        assert self._reached.wait(DEADLINE), "the engine computed no step"


@dataclass
class HttpServer:
    """One server: `with` starts it, waits until it is ready and stops it.

    Attributes:
        settings: of the server; its port is not used, any free one is.
        inspected: the model.
        metrics: of the server.
        load: as `create_app` takes it.
        wait_ready: False where a test looks at the time before.
        tracing: of its requests.
        failures: what `load` raised.
    """

    settings: Settings
    inspected: InspectedModel
    metrics: Metrics
    load: Callable[[], LoadedServer]
    wait_ready: bool = True
    tracing: Tracing = UNTRACED
    failures: list[Exception] = field(default_factory=list)
    loaded: LoadedServer | None = None

    def __enter__(self) -> Self:
        self.app = create_app(self.settings, self.inspected, self.metrics, self._load, self._fail, self.tracing)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(self.app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=60)
        )
        self._thread = threading.Thread(target=self._uvicorn.run, name="http-server", daemon=True)
        self._thread.start()
        wait_until(lambda: self._uvicorn.started or not self._thread.is_alive(), "the server listens")
        assert self._uvicorn.started, "the server did not start"
        self.url = f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}"
        self.client = self.new_client()
        if self.wait_ready:
            wait_until(lambda: bool(self.failures) or self._is_ready(), "the server is ready")
            assert not self.failures, self.failures
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.client.close()
        self._uvicorn.should_exit = True
        self._thread.join(DEADLINE)
        if error is None:
            assert not self._thread.is_alive(), "the server did not stop"
            self.assert_nothing_left()

    def new_client(self, **options: Any) -> httpx.Client:
        """A client of this server."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE, trust_env=False, **options)

    def openai(self, api_key: str = "none") -> OpenAI:
        """OpenAI's own client, which makes one attempt."""
        client = DefaultHttpxClient(trust_env=False, timeout=DEADLINE)
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, http_client=client)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that serves."""
        return self._uvicorn.servers[0].get_loop()

    @property
    def scheduler(self) -> Scheduler:
        assert self.loaded is not None
        return self.loaded.engine._engine.scheduler

    @property
    def is_serving(self) -> bool:
        """Whether the HTTP server itself still runs."""
        return self._thread.is_alive()

    @property
    def num_queued(self) -> int:
        """Requests that wait to run."""
        assert self.loaded is not None
        return self.loaded.engine.num_queued

    @property
    def inbox_size(self) -> int:
        """Messages that the engine's thread has not taken yet."""
        assert self.loaded is not None
        return self.loaded.engine._inbox.qsize()

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or live."""
        assert self.loaded is not None
        return self.num_queued == 0 and not self.loaded.engine._engine._live

    def wait_until_idle(self) -> None:
        """Wait until every request has ended and every page is back."""
        wait_until(
            lambda: self.is_idle and self.scheduler.pages.num_used == 0, "no request is left and no page is used"
        )
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """No request is left, and the pool is whole."""
        if self.loaded is None:
            return
        assert self.is_idle
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_pages
        self.scheduler.pages.check()

    def samples(self) -> dict[str, float]:
        """What /metrics says now: name, or name{label=value,...}, to value."""
        text = self.client.get("/metrics").text
        return {
            sample_name(sample.name, sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def _is_ready(self) -> bool:
        return self.client.get("/ready").status_code == 200

    def _load(self) -> LoadedServer:
        self.loaded = self.load()
        return self.loaded

    def _fail(self, error: Exception) -> None:
        self.failures.append(error)
        self._uvicorn.should_exit = True


@dataclass
class FakeServer(HttpServer):
    """A server on the fake model.

    Attributes:
        gate: stops the engine, or makes its steps fail.
        parts: the engine's parts.
    """

    gate: StepGate = field(default_factory=StepGate)
    parts: EngineUnderTest = field(default_factory=EngineUnderTest)

    def writes(self, *texts: str) -> None:
        """From here on have the model write a text and end, whatever the prompt; of several, each choice its own."""
        assert self.loaded is not None
        encode = self.loaded.tokenizer.backend_tokenizer.encode
        scripts = [[*encode(text).ids, END_TOKEN] for text in texts]

        def script(sequence: Sequence) -> list[int]:
            return scripts[0 if len(scripts) == 1 else int(sequence.request_id.rpartition("-")[2])]

        self.parts.runner.script = script


def fake_server(
    *,
    end_tokens: Iterable[int] = (END_TOKEN,),
    generation: GenerationDefaults | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    before_load: Callable[[], None] = lambda: None,
    wait_ready: bool = True,
    num_pages: int = 512,
    native_length: int = GEOMETRY.native_length,
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
    **settings: Any,
) -> FakeServer:
    """A server on the fake model, greedy unless a request says otherwise: native length 64, maximum length four times
    as much. Prompts are computed whole unless `prefix_caching` is set.

    Args:
        end_tokens: of the model.
        generation: the model's own defaults, instead of greedy with `end_tokens`.
        chat_template: of its tokenizer.
        before_load: runs while the server is not ready; may wait or raise.
        wait_ready: False to get the server before it is ready.
        num_pages: of the pool, of four tokens each.
        native_length: of the model, in tokens.
        special_tokens: of its tokenizer.
        settings: of the server.
    """
    checked = Settings(**{"max_running": 8, "max_batch_tokens": 16, "prefix_caching": False} | settings)
    gate = StepGate()
    parts = EngineUnderTest(
        num_pages, checked.max_running, checked.max_batch_tokens, gate, prefix_caching=checked.prefix_caching
    )
    tokenizer = byte_tokenizer(special_tokens)
    tokenizer.chat_template = chat_template

    def load() -> LoadedServer:
        before_load()
        backend: Tokenizer = tokenizer.backend_tokenizer
        new_text_stream = text_streams(backend)
        core = Engine(parts.runner, parts.scheduler, new_text_stream, parts.metrics, page_bytes=100)
        engine = EngineThread(core, parts.metrics, max_running=checked.max_running, max_queued=checked.max_queued)
        engine.start()
        defaults = generation or GenerationDefaults(frozenset(end_tokens), temperature=0.0)
        grammars = GrammarFactory(backend, defaults.end_token_ids)
        longest = build.longest_token_bytes(backend)
        template = ChatTemplate(tokenizer)
        return LoadedServer(engine, tokenizer, new_text_stream, defaults, VOCABULARY, longest, grammars, template)

    geometry = replace(GEOMETRY, original_length=native_length, native_length=native_length)
    inspected = InspectedModel(MODEL, Policy(geometry), torch.device("cpu"), torch.float32)
    return FakeServer(checked, inspected, parts.metrics, load, wait_ready, gate=gate, parts=parts)


def real_server(**settings: Any) -> HttpServer:
    """A server on a real model, assembled as `ropewalk serve` assembles it."""
    checked = Settings(**settings)
    inspected = build.inspect(checked)
    metrics = Metrics(CollectorRegistry())
    return HttpServer(checked, inspected, metrics, lambda: build.load(checked, inspected, metrics))


@dataclass
class EventStream:
    """A stream of server-sent events, read to its end.

    Attributes:
        data: each event's JSON.
        done: whether `[DONE]` came last.
        comments: how many comments came between.
    """

    data: list[Any] = field(default_factory=list)
    done: bool = False
    comments: int = 0

    def read(self, line: str) -> None:
        """Take one line."""
        assert not self.done or not line, f"after [DONE]: {line!r}"
        if line.startswith(":"):
            self.comments += 1
        elif line == "data: [DONE]":
            self.done = True
        elif line:
            kind, _, text = line.partition(": ")
            assert kind == "data", line
            self.data.append(json.loads(text))

    @property
    def text(self) -> str:
        """All the text, whatever the route's shape."""
        return "".join(map(piece_of, self.data))


def piece_of(event: Any) -> str:
    """The text that one event brings."""
    if "choices" not in event:
        return str(event.get("text", ""))
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


def read_stream(client: httpx.Client, path: str, body: Mapping[str, Any]) -> EventStream:
    """Post a body with `stream: true` and read the stream to its end."""
    stream = EventStream()
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            stream.read(line)
    return stream


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """A sample's name with its labels in alphabetical order."""
    inner = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of an answer, its shape checked to be OpenAI's."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error
