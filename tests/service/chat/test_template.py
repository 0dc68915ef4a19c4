"""What a template writes, and what is told from it."""

import json
from typing import Any

import pytest

from service.chat.formats import FORMATS
from service.chat.splitter import Splitter, ToolCall, Tools
from service.chat.template import ChatTemplate
from service.errors import RequestError
from tests.service.chat.templates import (
    BY_FORMAT,
    LLAMA,
    MISTRAL,
    PLAIN,
    QWEN,
    QWEN_ALWAYS_THINKING,
    UNKNOWN_TOOLS,
    tokenizer_with,
)

USER = {"role": "user", "content": "Weather?"}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ARGUMENTS = {"city": 'Zür"ich</tool_call>', "days": 3, "nested": {"list": [1.5, None, True]}}


def call_message(*names: str, arguments: dict[str, Any] = ARGUMENTS) -> dict[str, Any]:
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(("name", "template"), BY_FORMAT.items())
def test_each_family_is_known_by_its_template(name: str, template: str) -> None:
    looked_at = ChatTemplate(tokenizer_with(template))
    assert looked_at.knows_tools
    assert looked_at.require_tool_format() is FORMATS[name]


@pytest.mark.parametrize("name", [name for name in BY_FORMAT if name != "qwen-xml"])
def test_calls_that_the_template_writes_are_read_back(name: str) -> None:
    template = ChatTemplate(tokenizer_with(BY_FORMAT[name]))
    names = ["get_weather"] if name == "llama" else ["get_weather", "wait"]
    text = template.render([USER, call_message(*names)], [TOOL])
    before = template.render([USER], [TOOL]).removesuffix("<|im_start|>assistant\n").removesuffix("<|assistant|>")
    answer = text[len(before) :] if name != "mistral" else text[text.index("[TOOL_CALLS]") :]
    answer = answer.removeprefix("<|im_start|>assistant\n").removeprefix("<|assistant|>")
    tool_format = template.require_tool_format()
    splitter = Splitter(tools=Tools(tool_format, {"get_weather": {}, "wait": {}}))
    calls = [part for part in [*splitter.feed(answer), *splitter.end()] if isinstance(part, ToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [(name, ARGUMENTS) for name in names]


def test_calls_written_as_tags_are_read_back_by_their_schema() -> None:
    template = ChatTemplate(tokenizer_with(BY_FORMAT["qwen-xml"]))
    arguments = {"city": "a\n\nb </parameter> c", "days": 3, "dry": True, "more": {"a": [1]}, "code": "5"}
    types = {"city": "string", "days": "integer", "dry": "boolean", "more": "object", "code": "string"}
    schema = {"properties": {key: {"type": name} for key, name in types.items()}}
    text = template.render([call_message("get_weather", arguments=arguments)])
    splitter = Splitter(tools=Tools(template.require_tool_format(), {"get_weather": schema}))
    [call] = [part for part in splitter.feed(text) if isinstance(part, ToolCall)]
    assert json.loads(call.arguments) == arguments


def test_a_template_without_tools_refuses_tools_and_calls() -> None:
    template = ChatTemplate(tokenizer_with(PLAIN))
    assert not template.knows_tools
    with pytest.raises(RequestError, match="takes none") as refused:
        template.require_tool_format()
    assert refused.value.param == "tools"
    for messages in ([USER, call_message("a")], [{"role": "tool", "tool_call_id": "x", "content": "1"}]):
        with pytest.raises(RequestError, match="no tool calls") as refused:
            template.render(messages)
        assert refused.value.param == "messages"


def test_a_template_that_would_leave_calls_out_refuses_them() -> None:
    template = ChatTemplate(tokenizer_with(UNKNOWN_TOOLS))
    assert template.knows_tools
    assert template.leaves_calls_out
    with pytest.raises(RequestError, match="leaves tool calls out") as refused:
        template.render([USER, call_message("a")])
    assert refused.value.param == "messages"


@pytest.mark.parametrize("template", BY_FORMAT.values(), ids=BY_FORMAT)
def test_templates_that_write_calls_are_told(template: str) -> None:
    assert not ChatTemplate(tokenizer_with(template)).leaves_calls_out


def test_a_template_that_refuses_the_look_at_its_calls_is_asked_again_when_there_are_some() -> None:
    refusing = "{% for each in messages if each.tool_calls %}{{ raise_exception('no calls here') }}{% endfor %}"
    template = ChatTemplate(tokenizer_with(UNKNOWN_TOOLS + refusing))
    with pytest.raises(RequestError, match="refuses them: no calls here"):
        template.render([USER, call_message("a")])


def test_tools_of_an_unknown_format_are_refused_by_name() -> None:
    template = ChatTemplate(tokenizer_with(UNKNOWN_TOOLS))
    assert template.knows_tools
    assert "get_weather" in template.render([USER], [TOOL])
    with pytest.raises(RequestError, match=r"format that is not known .*hermes"):
        template.require_tool_format()


def test_quotes_that_a_template_escapes_do_not_hide_its_format() -> None:
    escaped = UNKNOWN_TOOLS + '{# ipython: "{\\"name\\": name, \\"parameters\\": object}" #}'
    assert ChatTemplate(tokenizer_with(escaped)).tool_format is FORMATS["llama"]


@pytest.mark.parametrize(
    "shown",
    ["<tool_call>name <arg_key>key</arg_key> </tool_call>", "<tool_call></tool_call> <tool_calls>[]</tool_calls>"],
)
def test_tool_calls_in_other_tags_are_not_taken_for_hermes(shown: str) -> None:
    other = UNKNOWN_TOOLS + "{# " + shown + " #}"
    assert ChatTemplate(tokenizer_with(other)).tool_format is None


def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools() -> None:
    template = ChatTemplate(tokenizer_with({"default": PLAIN + "{{ extra }}", "tool_use": QWEN}))
    assert template.require_tool_format() is FORMATS["hermes"]
    assert template.render([USER], variables={"extra": "!"}) == "user: Weather?\n!"
    assert "# Tools" in template.render([USER], [TOOL])
    assert "# Tools" not in template.render([USER], [])
    assert template.knows("extra")
    assert template.knows("enable_thinking")


def test_a_call_without_text_is_rendered_without_none() -> None:
    text = ChatTemplate(tokenizer_with(QWEN)).render([USER, call_message("get_weather")], [TOOL])
    assert '<|im_start|>assistant\n\n<tool_call>\n{"name": "get_weather"' in text


def test_ids_are_shortened_alike_in_calls_and_results_for_templates_that_want_it() -> None:
    template = ChatTemplate(tokenizer_with(MISTRAL))
    result = {"role": "tool", "tool_call_id": "call_0", "content": "1"}
    text = template.render([USER, call_message("get_weather"), result])
    [called] = [piece[:9] for piece in text.split('"id": "')[1:]]
    assert f'"call_id": "{called}"' in text


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    assert ChatTemplate(tokenizer_with(PLAIN)).render(messages).startswith("system: Be brief.")
    knows = PLAIN + "{# developer #}"
    assert ChatTemplate(tokenizer_with(knows)).render(messages).startswith("developer: Be brief.")


def test_variables_that_the_template_reads_are_known() -> None:
    template = ChatTemplate(tokenizer_with(QWEN))
    assert template.knows("enable_thinking")
    assert not template.knows("reasoning_effort")
    assert not template.knows("message")
    assert template.render([USER], variables={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert template.render([USER], variables={"enable_thinking": True}).endswith("assistant\n")
    own = "{% set enable_thinking = enable_thinking | default(true) %}{% set mine = 1 %}{{ mine }}"
    assert ChatTemplate(tokenizer_with(own)).knows("enable_thinking")
    assert not ChatTemplate(tokenizer_with(own)).knows("mine")


def test_blocks_of_transformers_own_do_not_hide_variables() -> None:
    text = "{% generation %}{{ inside }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}{{ after }}"
    template = ChatTemplate(tokenizer_with(text))
    assert template.knows("inside")
    assert template.knows("after")
    assert template.render([USER], variables={"inside": "x", "after": "y"}) == "xy"


def test_reasoning_that_the_prompt_opens_is_told_from_the_prompt() -> None:
    thinking = ChatTemplate(tokenizer_with(QWEN_ALWAYS_THINKING))
    assert thinking.reasoning is not None
    assert thinking.reasoning.opened_by(thinking.render([USER]))
    optional = ChatTemplate(tokenizer_with(QWEN))
    assert optional.reasoning == thinking.reasoning
    assert not thinking.reasoning.opened_by(optional.render([USER]))
    assert not thinking.reasoning.opened_by(optional.render([USER], variables={"enable_thinking": False}))
    assert ChatTemplate(tokenizer_with(PLAIN)).reasoning is None
    bracketed = ChatTemplate(tokenizer_with(BY_FORMAT["mistral-named"])).reasoning
    assert bracketed is not None
    assert bracketed.opening == "[THINK]"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN + "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (PLAIN + "{{ 1 + 'a' }}", "unsupported operand"),
        (PLAIN + "{{ messages.__class__.__mro__ }}", "unsafe"),
        (PLAIN + "{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        (PLAIN + "{% if %}", "Expected an expression"),
        (PLAIN + "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_quoted(template: str, reason: str) -> None:
    failing = ChatTemplate(tokenizer_with(template))
    assert not failing.knows_tools
    with pytest.raises(RequestError, match=f"chat template refuses them: .*{reason}") as refused:
        failing.render([USER])
    assert refused.value.param == "messages"


def test_more_calls_than_the_template_takes_are_refused_in_its_words() -> None:
    with pytest.raises(RequestError, match="one call at once!"):
        ChatTemplate(tokenizer_with(LLAMA)).render([USER, call_message("a", "b")])


def test_no_template_is_said_when_something_is_to_be_rendered() -> None:
    template = ChatTemplate(tokenizer_with(None))
    assert not template.knows_tools
    assert template.reasoning is None
    with pytest.raises(RequestError, match="has no chat template"):
        template.render([USER])


def test_half_a_surrogate_pair_from_json_is_refused() -> None:
    template = ChatTemplate(tokenizer_with(QWEN))
    with pytest.raises(RequestError, match="surrogate"):
        template.render([USER, call_message("a", arguments={"x": "\ud800"})], [TOOL])
    with pytest.raises(RequestError, match="surrogate"):
        template.render([USER], [{"type": "function", "function": {"name": "a", "description": "\ud800"}}])


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tools", "add_generation_prompt", "tokenize", "reasoning_effort", "message"]
)
def test_variables_that_the_template_does_not_take_are_refused(name: str) -> None:
    template = ChatTemplate(tokenizer_with(QWEN + "{{ chat_template }}"))
    with pytest.raises(RequestError, match=f"takes no {name}") as refused:
        template.render([USER], variables={name: "{{ 1 }}"})
    assert refused.value.param == "chat_template_kwargs"
