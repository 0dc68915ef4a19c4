"""Tool calls and reasoning over HTTP: a model that writes given texts, or is forced to, under several templates."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, cast

import httpx
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessage, ChatCompletionToolParam
from pydantic import BaseModel, ConfigDict

from tests.service.chat.templates import BY_FORMAT, LLAMA, MISTRAL, QWEN, QWEN_ALWAYS_THINKING
from tests.serving import MODEL, SPECIAL_TOKENS, EventStream, FakeServer, error_of, fake_server, read_stream, wait_until

PATH = "/v1/chat/completions"
ASK = {"role": "user", "content": "Weather?"}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tells.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
ROME_CALL: tuple[str, Any] = ("get_weather", {"city": "Rome", "days": 1})
STOP_CALL: tuple[str, Any] = ("stop", {})
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


UNTHINKING = re.sub("</?think>", "", QWEN)


def tool_server(template: str, **options: Any) -> FakeServer:
    sizes: dict[str, Any] = {"native_length": 1024, "num_pages": 2048, "max_batch_tokens": 512}
    return fake_server(chat_template=template, **sizes, **options)


@pytest.fixture(scope="module", params=[SPECIAL_TOKENS, (*SPECIAL_TOKENS, *MARKERS)], ids=["plain", "special markers"])
def shared(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with tool_server(QWEN, special_tokens=request.param) as running:
        yield running


@pytest.fixture(scope="module", params=[SPECIAL_TOKENS, (*SPECIAL_TOKENS, *MARKERS)], ids=["plain", "special markers"])
def shared_unthinking(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with tool_server(UNTHINKING, special_tokens=request.param) as running:
        yield running


@pytest.fixture
def server(shared: FakeServer) -> Iterator[FakeServer]:
    yield shared
    shared.parts.runner.script = lambda _: None
    shared.wait_until_idle()


@pytest.fixture
def unthinking(shared_unthinking: FakeServer) -> Iterator[FakeServer]:
    """A model that has no marks of reasoning: one that has may think for ever before it calls."""
    yield shared_unthinking
    shared_unthinking.parts.runner.script = lambda _: None
    shared_unthinking.wait_until_idle()


@pytest.fixture
def openai(server: FakeServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [ASK], "tools": TOOLS, "max_tokens": 400} | fields


def whole(server: FakeServer, **fields: Any) -> dict[str, Any]:
    response = server.client.post(PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(server: FakeServer, **fields: Any) -> dict[str, Any]:
    """The same answer from a stream, in the shape of a whole one."""
    return put_together(read_stream(server.client, PATH, body(**fields)))


def put_together(stream: EventStream) -> dict[str, Any]:
    message: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    reasons, calls = [], []
    for event in stream.data:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content", "")
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            calls += delta.get("tool_calls", [])
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert [call.pop("index") for call in calls] == [*range(len(calls))]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    [reason] = reasons
    assert stream.done
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in found)
    assert len({call["id"] for call in found}) == len(found)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice["message"].get("tool_calls", []):
        del call["id"]
    return choice


READ = pytest.mark.parametrize("read", [whole, streamed])


class TestAuto:
    @READ
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            pytest.param(ROME, None, [ROME_CALL], id="a call"),
            pytest.param(f"Let me see.\n{ROME}", "Let me see.", [ROME_CALL], id="a call after content"),
            pytest.param(f"{ROME}\n{STOP}\n{ROME}", None, [ROME_CALL, STOP_CALL, ROME_CALL], id="several"),
            pytest.param("It rains.", "It rains.", [], id="none"),
            pytest.param("", "", [], id="nothing"),
        ],
    )
    def test_calls_are_told_as_such_and_content_as_such(
        self, server: FakeServer, read: Any, text: str, content: str | None, calls: list[tuple[str, Any]]
    ) -> None:
        server.writes(text)
        choice = read(server)
        assert (choice["message"]["content"], calls_of(choice["message"])) == (content, calls)
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        assert "reasoning_content" not in choice["message"]
        assert ("tool_calls" in choice["message"]) == bool(calls)

    @READ
    @pytest.mark.parametrize(
        "text",
        [
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "get_weather", "argum',
            "<tool_call> is what I would write.",
            "<tool_",
        ],
    )
    def test_what_is_no_call_after_all_is_content(self, server: FakeServer, read: Any, text: str) -> None:
        server.writes(text)
        choice = read(server)
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]

    @READ
    def test_what_max_tokens_cuts_off_is_content_that_ended_by_length(self, server: FakeServer, read: Any) -> None:
        server.writes("x" + ROME)
        choice = read(server, max_tokens=20)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("x<tool_call>\n{")
        assert ROME.startswith(choice["message"]["content"][1:])

    @READ
    def test_a_call_that_max_tokens_leaves_whole_ended_by_length_all_the_same(
        self, server: FakeServer, read: Any
    ) -> None:
        server.writes(ROME + "more and more")
        tokens = len(server.client.post("/tokenize", json={"prompt": ROME}).json()["tokens"])
        choice = read(server, max_tokens=tokens + 2)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "mo")
        assert calls_of(choice["message"]) == [ROME_CALL]

    @READ
    def test_each_choice_has_its_own(self, server: FakeServer, read: Any) -> None:
        server.writes(ROME, "It rains.", STOP)
        if read is whole:
            answer = server.client.post(PATH, json=body(n=3)).json()["choices"]
            assert [calls_of(choice["message"]) for choice in answer] == [[ROME_CALL], [], [STOP_CALL]]
            assert [choice["finish_reason"] for choice in answer] == ["tool_calls", "stop", "tool_calls"]
            return
        stream = read_stream(server.client, PATH, body(n=3))
        names = {
            (choice["index"], call["function"]["name"], call["index"])
            for event in stream.data
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", [])
        }
        assert names == {(0, "get_weather", 0), (2, "stop", 0)}

    def test_the_tools_are_told_to_the_model(self, server: FakeServer) -> None:
        plain, told = (
            server.client.post("/tokenize", json={"messages": [ASK], "tools": tools}).json()["count"]
            for tools in (None, TOOLS)
        )
        server.writes("")
        for choice, expected in ((None, told), ("auto", told), ("none", plain)):
            answer = server.client.post(PATH, json=body(tool_choice=choice)).json()
            assert answer["usage"]["prompt_tokens"] == expected

    def test_a_stop_string_inside_a_call_ends_it(self, server: FakeServer) -> None:
        server.writes("a" + ROME)
        choice = whole(server, stop=["Rome"])
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "a" + ROME[: ROME.index("Rome")]

    def test_log_probabilities_cover_the_calls(self, server: FakeServer) -> None:
        server.writes(ROME)
        choice = whole(server, logprobs=True)
        said = "".join(token["token"] for token in choice["logprobs"]["content"])
        assert said == ROME + SPECIAL_TOKENS[0]
        stream = read_stream(server.client, PATH, body(logprobs=True))
        parts = [choice["logprobs"] for event in stream.data for choice in event["choices"] if choice["logprobs"]]
        assert "".join(token["token"] for part in parts for token in part["content"]) == said


class TestOneCallOnly:
    """`parallel_tool_calls: false`."""

    @READ
    def test_generation_ends_after_the_first(self, server: FakeServer, read: Any) -> None:
        server.writes("See:" + ROME + STOP * 5)
        choice = read(server, parallel_tool_calls=False)
        assert (choice["message"]["content"], calls_of(choice["message"])) == ("See:", [ROME_CALL])
        assert choice["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize("stream", [False, True])
    def test_it_costs_no_more_than_a_few_tokens_more(self, server: FakeServer, stream: bool) -> None:
        """Those that come before the engine hears of it."""
        server.writes(ROME + "x" * 380)
        held: list[int] = []

        def hold(number: int, step: Any) -> None:
            [sequence] = step
            if len(sequence.output) == 150:
                held.append(number)
                wait_until(lambda: server.inbox_size > 0, "the end of the choice reaches the engine")

        server.parts.runner.before_step, usual = hold, server.parts.runner.before_step
        try:
            content = body(parallel_tool_calls=False, stream=stream)
            if stream:
                content |= {"stream_options": {"include_usage": True}}
                usage = read_stream(server.client, PATH, content).data[-1]["usage"]
            else:
                usage = server.client.post(PATH, json=content).json()["usage"]
        finally:
            server.parts.runner.before_step = usual
        assert usage["completion_tokens"] <= 151

    def test_other_choices_go_on(self, server: FakeServer) -> None:
        server.writes(ROME + "x" * 100, "y" * 300)
        answer = server.client.post(PATH, json=body(n=2, parallel_tool_calls=False)).json()["choices"]
        assert [choice["finish_reason"] for choice in answer] == ["tool_calls", "stop"]
        assert answer[1]["message"]["content"] == "y" * 300


class TestNone:
    @READ
    def test_nothing_is_taken_for_a_call(self, server: FakeServer, read: Any) -> None:
        server.writes('{"name": "stop"} <tool_call')
        choice = read(server, tool_choice="none")
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "stop"} <tool_call', "stop")

    @READ
    def test_nothing_written_as_a_call_is_told_as_one(self, server: FakeServer, read: Any) -> None:
        server.writes(ROME)
        choice = read(server, tool_choice="none")
        assert "tool_calls" not in choice["message"]
        assert '"city": "Rome"' in choice["message"]["content"]

    def test_it_goes_with_a_response_format(self, server: FakeServer) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}
        choice = whole(server, tool_choice="none", response_format=schema, temperature=2.0, seed=1)
        assert json.loads(choice["message"]["content"]).keys() == {"city", "days"}

    @pytest.mark.parametrize("tool_choice", [None, "auto", "required"])
    @pytest.mark.parametrize(
        ("constraint", "param"),
        [
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ],
    )
    def test_others_do_not(self, server: FakeServer, tool_choice: Any, constraint: Any, param: str) -> None:
        response = server.client.post(PATH, json=body(tool_choice=tool_choice, **constraint))
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert "goes with tools only where tool_choice is none" in error_of(response)["message"]


NO_OPINION = {str(token): 20 for token in range(32, 127)}
"""Makes the fake model, which is all but sure of itself, prefer anything printable to white space and itself."""
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class TestForced:
    """Under random logits: the grammar alone makes the call."""

    @READ
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize(("wanted", "names"), [("required", {"get_weather", "stop"}), (NAMED, {"get_weather"})])
    def test_a_call_comes_whatever_the_model_would_say(
        self, unthinking: FakeServer, read: Any, seed: int, wanted: Any, names: set[str]
    ) -> None:
        fields = {"tool_choice": wanted, "temperature": 2.0, "seed": seed, "parallel_tool_calls": False}
        choice = read(unthinking, **fields, logit_bias=NO_OPINION, max_tokens=1000)
        [(name, arguments)] = calls_of(choice["message"])
        assert name in names
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        if name == "get_weather":
            assert arguments["city"] in ("Rome", "Oslo")
            assert arguments["days"] in (1, 2)
        else:
            assert arguments == {}

    def test_the_function_that_is_named_is_the_one(self, unthinking: FakeServer) -> None:
        for name in ("get_weather", "stop"):
            wanted = {"type": "function", "function": {"name": name}}
            choice = whole(unthinking, tool_choice=wanted, temperature=2.0, seed=0, logit_bias=NO_OPINION)
            assert [called for called, _ in calls_of(choice["message"])] == [name]

    def test_several_may_come_where_they_may(self, unthinking: FakeServer) -> None:
        unthinking.writes(f"{ROME}\n{STOP}")
        choice = whole(unthinking, tool_choice="required")
        assert calls_of(choice["message"]) == [ROME_CALL, STOP_CALL]

    @pytest.mark.parametrize(
        ("tool_choice", "param", "said"),
        [
            ({"type": "function", "function": {"name": "other"}}, "tool_choice", "there is no function other"),
            ({"type": "function"}, "tool_choice.function", "is missing"),
            ("any", "tool_choice", "'any'"),
            ({"type": "custom", "custom": {"name": "stop"}}, "tool_choice", "custom"),
        ],
    )
    def test_what_is_not_there_cannot_be_forced(
        self, server: FakeServer, tool_choice: Any, param: str, said: str
    ) -> None:
        response = server.client.post(PATH, json=body(tool_choice=tool_choice))
        error = error_of(response)
        assert response.status_code == 400
        assert error["param"].startswith("tool_choice")
        assert said in error["message"]
        assert param.startswith("tool_choice")

    @pytest.mark.parametrize(
        ("tools", "said"),
        [
            ([TOOLS[0], TOOLS[0]], "a function get_weather already"),
            ([{"type": "function", "function": {"name": "a b"}}], "pattern"),
            ([{"type": "custom", "custom": {"name": "a"}}], "custom"),
            ([TOOLS[1]] * 1025, "1024"),
        ],
    )
    def test_bad_tools_are_refused(self, server: FakeServer, tools: Any, said: str) -> None:
        response = server.client.post(PATH, json=body(tools=tools))
        assert response.status_code == 400
        assert error_of(response)["param"].startswith("tools")
        assert said in error_of(response)["message"]

    @pytest.mark.parametrize("parameters", [{"type": "nonsense"}, {"type": "array"}, {"$ref": "#/nowhere"}])
    def test_parameters_that_no_call_can_follow_are_refused_where_one_is_forced(
        self, server: FakeServer, parameters: dict[str, Any]
    ) -> None:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        response = server.client.post(PATH, json=body(tools=tools, tool_choice="required"))
        assert response.status_code == 400
        assert error_of(response)["param"] in ("tools", "tool_choice")


@pytest.mark.parametrize("name", [name for name in BY_FORMAT if name != "qwen-xml"])
def test_every_format_that_can_be_forced_is(name: str) -> None:
    template = re.sub(r"</?think>|\[/?THINK\]", "", BY_FORMAT[name])  # or it may think for ever
    with tool_server(template) as server:
        for choice, stream in (("required", False), (NAMED, True)):
            read = streamed if stream else whole
            fields = {"tool_choice": choice, "parallel_tool_calls": False, "seed": 3, "temperature": 1.5}
            [(called, arguments)] = calls_of(read(server, **fields)["message"])
            assert called == "get_weather" or choice == "required"
            assert arguments.keys() == ({"city", "days"} if called == "get_weather" else set())


def test_a_format_that_cannot_be_forced_says_so_and_is_read_all_the_same() -> None:
    with tool_server(BY_FORMAT["qwen-xml"]) as server:
        error = error_of(server.client.post(PATH, json=body(tool_choice="required")))
        assert (error["param"], "qwen-xml" in error["message"]) == ("tool_choice", True)
        parameters = "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1\n</parameter>\n"
        server.writes(f"<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>")
        assert calls_of(whole(server)["message"]) == [ROME_CALL]


class TestReasoning:
    @READ
    @pytest.mark.parametrize(
        ("text", "reasoning", "content"),
        [
            ("<think>\nRome?\n</think>\n\nSunny.", "Rome?", "Sunny."),
            ("<think>\n\n</think>\n\nSunny.", None, "Sunny."),
            ("<think>\nendless", "endless", ""),
            ("Sunny. <think> No.", None, "Sunny. <think> No."),
        ],
    )
    def test_it_is_told_apart_from_content(
        self, server: FakeServer, read: Any, text: str, reasoning: str | None, content: str
    ) -> None:
        server.writes(text)
        for tools in (TOOLS, None):
            message = read(server, tools=tools)["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)

    @READ
    def test_calls_can_follow_it(self, server: FakeServer, read: Any) -> None:
        server.writes(f"<think>\nA {STOP} maybe.\n</think>\n\n{ROME}")
        choice = read(server)
        assert choice["message"]["reasoning_content"] == f"A {STOP} maybe."
        assert calls_of(choice["message"]) == [ROME_CALL]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")

    @READ
    def test_a_prompt_that_opens_it_begins_inside(self, read: Any) -> None:
        with tool_server(QWEN_ALWAYS_THINKING) as server:
            server.writes(f"Rome?\n</think>\n\n{ROME}")
            choice = read(server)
            assert (choice["message"]["reasoning_content"], calls_of(choice["message"])) == ("Rome?", [ROME_CALL])
            server.writes("Hm.</think>Sunny.")
            message = read(server, tools=None)["message"]
            assert (message["reasoning_content"], message["content"]) == ("Hm.", "Sunny.")

    def test_a_forced_call_comes_after_what_the_prompt_opened(self) -> None:
        with tool_server(QWEN_ALWAYS_THINKING) as server:
            server.writes(f"Rome?\n</think>\n\n{ROME}")
            choice = whole(server, tool_choice="required")
        assert (choice["message"]["reasoning_content"], calls_of(choice["message"])) == ("Rome?", [ROME_CALL])

    def test_a_template_value_switches_it_off(self, server: FakeServer) -> None:
        plain, without = (
            server.client.post("/tokenize", json={"messages": [ASK], "chat_template_kwargs": values}).json()["tokens"]
            for values in (None, {"enable_thinking": False})
        )
        assert without[: len(plain)] == plain
        assert len(without) > len(plain)
        server.writes("Sunny.")
        message = whole(server, tools=None, chat_template_kwargs={"enable_thinking": False})["message"]
        assert (message["content"], "reasoning_content" in message) == ("Sunny.", False)

    def test_what_must_match_something_is_not_searched_for_it(self) -> None:
        text = "<think>a</think>b"
        with tool_server(QWEN) as server:
            message = whole(server, tools=None, structured_outputs={"regex": text})["message"]
        assert (message["content"], "reasoning_content" in message) == (text, False)


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


TYPED_TOOLS = cast(list[ChatCompletionToolParam], TOOLS)


class TestOpenAIsClient:
    def test_a_whole_conversation(self, server: FakeServer, openai: OpenAI) -> None:
        server.writes(f"Let me see.\n{ROME}")
        messages: list[Any] = [ASK]
        answer = openai.chat.completions.create(model=MODEL, messages=messages, tools=TYPED_TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == ROME_CALL[1]
        server.writes("<think>\nGood.\n</think>\n\nSunny in Rome.")
        # As the documentation has it: the message object itself goes back.
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = openai.chat.completions.create(model=MODEL, messages=messages, tools=TYPED_TOOLS)
        message = answer.choices[0].message
        assert message.content == "Sunny in Rome."
        assert message.model_extra == {"reasoning_content": "Good."}
        messages += [message, {"role": "user", "content": "Thanks"}]
        server.writes("Welcome.")
        answer = openai.chat.completions.create(model=MODEL, messages=messages, tools=TYPED_TOOLS)
        assert answer.choices[0].message.content == "Welcome."

    def test_a_message_object_with_every_field(self, server: FakeServer, openai: OpenAI) -> None:
        server.writes("Yes.")
        fields: dict[str, Any] = {
            "role": "assistant",
            "content": "A",
            "refusal": None,
            "annotations": [],
            "audio": None,
        }
        fields |= {"function_call": None, "tool_calls": None}
        message = ChatCompletionMessage.model_validate(fields)
        dumped = cast(Any, message.model_dump())
        for sent in (cast(Any, message), dumped):
            messages: list[Any] = [ASK, sent, ASK]
            answer = openai.chat.completions.create(model=MODEL, messages=messages)
            assert answer.choices[0].message.content == "Yes."

    def test_streamed_calls(self, server: FakeServer, openai: OpenAI) -> None:
        server.writes(f"{ROME}{STOP}")
        chunks = openai.chat.completions.create(
            model=MODEL, messages=cast(Any, [ASK]), tools=TYPED_TOOLS, stream=True, parallel_tool_calls=True
        )
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
        assert [(call.index, call.function and call.function.name) for call in calls] == [
            (0, "get_weather"),
            (1, "stop"),
        ]

    def test_parse_with_tools_and_what_it_gives_goes_back(self, server: FakeServer, openai: OpenAI) -> None:
        tools = [pydantic_function_tool(Weather, name="get_weather")]
        messages: list[Any] = [ASK]
        server.writes(ROME)
        parsed = openai.chat.completions.parse(model=MODEL, messages=messages, tools=tools)
        message = parsed.choices[0].message
        [call] = message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Rome", days=1)
        server.writes("Sunny.")
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = openai.chat.completions.parse(model=MODEL, messages=messages, tools=tools)
        assert answer.choices[0].message.content == "Sunny."

    @pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about its own message
    def test_parse_with_a_response_format_and_what_it_gives_goes_back(self, openai: OpenAI) -> None:
        messages: list[Any] = [ASK]
        for _ in range(2):
            parsed = openai.chat.completions.parse(
                model=MODEL, messages=messages, response_format=Weather, temperature=1.5, seed=4, max_tokens=200
            )
            message = parsed.choices[0].message
            assert isinstance(message.parsed, Weather)
            messages += [message, ASK]

    def test_stream_with_tools(self, server: FakeServer, openai: OpenAI) -> None:
        server.writes(f"See.\n{ROME}")
        tools = [pydantic_function_tool(Weather, name="get_weather")]
        with openai.chat.completions.stream(model=MODEL, messages=cast(Any, [ASK]), tools=tools) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert {"content.delta", "tool_calls.function.arguments.done"} <= set(kinds)
        message = final.choices[0].message
        [call] = message.tool_calls or []
        assert (message.content, final.choices[0].finish_reason) == ("See.", "tool_calls")
        assert call.function.parsed_arguments == Weather(city="Rome", days=1)

    def test_stream_with_a_response_format(self, openai: OpenAI) -> None:
        with openai.chat.completions.stream(
            model=MODEL,
            messages=cast(Any, [ASK]),
            response_format=Weather,
            seed=4,
            temperature=1.5,
            max_tokens=200,
            stream_options={"include_usage": True},
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Weather)
        assert final.usage is not None


def test_results_of_calls_reach_each_familys_template() -> None:
    """Ids are as each template wants them, names are found for results that come without."""
    for template, expected in ((MISTRAL, "[TOOL_RESULTS]"), (LLAMA, "<|ipython|>sunny"), (QWEN, "tool\nsunny")):
        with tool_server(template) as server:
            call = {"id": "call_abc", "type": "function", "function": {"name": "stop", "arguments": ""}}
            messages = [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "sunny", "tool_call_id": "call_abc"},
            ]
            tokens = server.client.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
            assert expected in bytes(tokens).decode()
            server.writes("fine")
            answer: httpx.Response = server.client.post(PATH, json=body(messages=messages))
            assert answer.json()["choices"][0]["message"]["content"] == "fine"
