"""OpenAI's official client, and bodies as LangChain writes them, against the embedded model through real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict

from tests.service.chat.templates import QWEN
from tests.serving import DEADLINE, HttpServer, real_server

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server(embedded_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """The embedded model under a template that knows tools, as `--chat-template` gives it one, without reasoning."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(QWEN.replace("<think>", "").replace("</think>", ""))
    model = str(embedded_model_folder)
    with real_server(
        model=model,
        served_model_name=NAME,
        chat_template=template,
        kv_cache_memory="512MiB",
        dtype="float32",
        max_model_len=4096,
    ) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def openai(server: HttpServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


@asynccontextmanager
async def async_client(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    client = DefaultAsyncHttpxClient(trust_env=False, timeout=DEADLINE)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=client) as openai:
        yield openai


def run(server: HttpServer, test: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    async def main() -> None:
        async with async_client(server) as openai:
            await test(openai)

    asyncio.run(main())


class City(BaseModel):
    """Where the weather is asked for."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    celsius: bool


class TestModels:
    def test_the_served_model_is_listed_and_found(self, openai: OpenAI) -> None:
        assert [model.id for model in openai.models.list()] == [NAME]
        assert openai.models.retrieve(NAME).id == NAME


class TestCompletions:
    def test_whole_and_streamed_are_the_same(self, openai: OpenAI) -> None:
        whole = openai.completions.create(model=NAME, prompt=PROMPT, **GREEDY)
        chunks = openai.completions.create(model=NAME, prompt=PROMPT, stream=True, **GREEDY)
        assert "Paris" in whole.choices[0].text
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text

    def test_a_batch_is_what_its_prompts_are_alone(self, openai: OpenAI) -> None:
        prompts = [PROMPT, "Two and two make", "The sea is"]
        alone = [openai.completions.create(model=NAME, prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
        together = openai.completions.create(model=NAME, prompt=prompts, n=2, **GREEDY)
        assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]

    def test_echo_and_logprobs_score_a_text(self, openai: OpenAI) -> None:
        """As evaluation harnesses do: the likelier of two endings."""
        scores: list[float] = []
        for ending in (" Paris", " banana"):
            text = PROMPT + ending
            answer = openai.completions.create(
                model=NAME, prompt=text, echo=True, logprobs=1, max_tokens=1, temperature=0
            )
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert answer.usage is not None
            values: list[Any] = logprobs.token_logprobs or []
            offsets = logprobs.text_offset or []
            assert len(values) == len(offsets) == answer.usage.total_tokens
            assert values[0] is None
            assert answer.choices[0].text.startswith(text)
            of_ending = [place for place, offset in enumerate(offsets) if len(PROMPT) <= offset < len(text)]
            scores.append(sum(values[place] for place in of_ending))
        assert scores[0] > scores[1] + 1

    def test_seeds_repeat_and_choices_differ(self, openai: OpenAI) -> None:
        first, again = (
            [c.text for c in openai.completions.create(model=NAME, prompt="Once", n=3, seed=5, max_tokens=8).choices]
            for _ in range(2)
        )
        assert first == again
        assert len(set(first)) == 3

    def test_stop_tokens_end_the_text(self, openai: OpenAI) -> None:
        whole = openai.completions.create(model=NAME, prompt=PROMPT, logprobs=0, **GREEDY)
        stop = server_tokens(openai, " Paris")
        ended = openai.completions.create(model=NAME, prompt=PROMPT, extra_body={"stop_token_ids": stop[:1]}, **GREEDY)
        assert ended.choices[0].finish_reason == "stop"
        assert ended.choices[0].text == whole.choices[0].text.partition(" Paris")[0]


def server_tokens(openai: OpenAI, text: str) -> list[int]:
    url = str(openai.base_url).removesuffix("v1/") + "tokenize"
    tokens: list[int] = openai._client.post(url, json={"prompt": text}).json()["tokens"]
    return tokens


class TestChats:
    def test_whole_and_streamed_are_the_same_in_every_choice(self, openai: OpenAI) -> None:
        whole = openai.chat.completions.create(model=NAME, messages=QUESTION, n=2, **GREEDY)
        texts = [choice.message.content for choice in whole.choices]
        assert texts[0] == texts[1]
        stream = openai.chat.completions.create(
            model=NAME, messages=QUESTION, n=2, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        read, usage = ["", ""], None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                read[choice.index] += choice.delta.content or ""
        assert read == texts
        assert usage is not None
        assert whole.usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )

    def test_logprobs(self, openai: OpenAI) -> None:
        answer = openai.chat.completions.create(model=NAME, messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        for token in logprobs.content or []:
            assert len(token.top_logprobs) == 3
            assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))  # greedy

    def test_parse_and_stream_give_what_the_schema_says(self, openai: OpenAI) -> None:
        options: dict[str, Any] = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
        parsed = openai.chat.completions.parse(response_format=City, **options)
        assert isinstance(parsed.choices[0].message.parsed, City)
        with openai.chat.completions.stream(response_format=City, **options) as stream:
            final = stream.until_done().get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed

    def test_a_bad_request_names_its_field(self, openai: OpenAI) -> None:
        with pytest.raises(BadRequestError) as refused:
            openai.chat.completions.create(model=NAME, messages=QUESTION, reasoning_effort="low", **GREEDY)
        assert (refused.value.param, refused.value.type) == ("reasoning_effort", "invalid_request_error")


class TestTools:
    TOOLS: list[Any] = [pydantic_function_tool(City, name="get_weather")]  # noqa: RUF012

    @pytest.mark.parametrize("wanted", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    def test_a_forced_call_and_its_result(self, openai: OpenAI, wanted: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
        options: dict[str, Any] = {"model": NAME, "tools": self.TOOLS, "temperature": 0, "max_tokens": 100}
        answer = openai.chat.completions.parse(
            messages=messages, tool_choice=wanted, parallel_tool_calls=False, **options
        )
        message = answer.choices[0].message
        [call] = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, City)
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."}]
        answer = openai.chat.completions.parse(messages=messages, tool_choice="none", **options)
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls

    def test_streamed(self, openai: OpenAI) -> None:
        with openai.chat.completions.stream(
            model=NAME,
            messages=[{"role": "user", "content": "Weather in Rome?"}],
            tools=self.TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=100,
        ) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [event.name for event in done] == ["get_weather"]
        City.model_validate_json(done[0].arguments)

    def test_left_to_itself_it_answers_somehow(self, openai: OpenAI) -> None:
        answer = openai.chat.completions.create(model=NAME, messages=QUESTION, tools=self.TOOLS, **GREEDY)
        message = answer.choices[0].message
        assert message.content is not None or message.tool_calls


class TestAsync:
    def test_many_at_a_time(self, server: HttpServer) -> None:
        async def test(openai: AsyncOpenAI) -> None:
            async def whole() -> str:
                answer = await openai.chat.completions.create(model=NAME, messages=QUESTION, **GREEDY)
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                chunks = await openai.chat.completions.create(model=NAME, messages=QUESTION, stream=True, **GREEDY)
                return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])

            texts = await asyncio.gather(whole(), streamed(), whole(), streamed())
            assert len(set(texts)) == 1
            assert "Paris" in texts[0]

        run(server, test)

    def test_a_stream_that_is_left_ends_its_request(self, server: HttpServer) -> None:
        async def test(openai: AsyncOpenAI) -> None:
            chunks = await openai.completions.create(model=NAME, prompt="Once", n=2, max_tokens=2000, stream=True)
            await anext(aiter(chunks))
            await chunks.close()

        run(server, test)
        server.wait_until_idle()


TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LANGCHAIN_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": TOOL_SCHEMA},
}


class TestLangChain:
    """Bodies as its ChatOpenAI writes them; nothing of it is needed."""

    BODIES: dict[str, dict[str, Any]] = {  # noqa: RUF012
        "plain": {"messages": [{"content": "Hello", "role": "user"}], "model": NAME, "stream": False},
        "with options": {
            "messages": [{"content": "Be brief.", "role": "system"}, {"content": "Hello", "role": "user"}],
            "model": NAME,
            "stream": False,
            "temperature": 0.7,
            "n": 1,
            "stop": ["\n\n"],
            "seed": 1,
            "user": "me",
            "metadata": {"run": "1"},
            "max_completion_tokens": 4,
        },
        "bound tools": {
            "messages": [{"content": "Weather?", "role": "user"}],
            "model": NAME,
            "stream": False,
            "tools": [LANGCHAIN_TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        "after a tool": {
            "messages": [
                {"content": "Weather in Rome?", "role": "user"},
                {
                    "content": None,
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "type": "function",
                            "id": "call_1",
                            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                        }
                    ],
                },
                {"content": "Sunny", "role": "tool", "tool_call_id": "call_1"},
            ],
            "model": NAME,
            "stream": False,
            "tools": [LANGCHAIN_TOOL],
        },
        "structured output": {
            "messages": [{"content": [{"type": "text", "text": "Rome"}], "role": "user"}],
            "model": NAME,
            "stream": False,
            "max_completion_tokens": 60,
            "temperature": 0.0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "City", "strict": True, "schema": City.model_json_schema()},
            },
        },
        "structured output by a call": {
            "messages": [{"content": "Rome", "role": "user"}],
            "model": NAME,
            "stream": False,
            "max_completion_tokens": 60,
            "temperature": 0.0,
            "tools": [{"type": "function", "function": {"name": "City", "parameters": City.model_json_schema()}}],
            "tool_choice": {"type": "function", "function": {"name": "City"}},
            "parallel_tool_calls": False,
        },
    }

    @pytest.mark.parametrize("name", BODIES)
    def test_each_is_answered(self, server: HttpServer, name: str) -> None:
        body = {"max_completion_tokens": 4} | self.BODIES[name]
        response = server.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        message = cast(dict[str, Any], response.json()["choices"][0]["message"])
        assert message["role"] == "assistant"
        if name == "structured output":
            City.model_validate_json(message["content"])
        if name == "structured output by a call":
            City.model_validate(json.loads(message["tool_calls"][0]["function"]["arguments"]))

    def test_a_stream_with_usage(self, server: HttpServer) -> None:
        body = self.BODIES["plain"] | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] <= 3
