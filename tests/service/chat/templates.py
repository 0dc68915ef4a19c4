"""Short chat templates in the styles of the model families, and a tokenizer that has one."""

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

QWEN_ALWAYS_THINKING = QWEN.replace("{%- if enable_thinking is defined and enable_thinking is false %}", "").replace(
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}", "{{- '<think>\\n' }}{# </think> follows #}"
)

QWEN_CODER = """\
{%- for tool in tools or [] %}{{- '<function>' + tool.function.name + '</function>\\n' }}{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- (value | tojson) if value is mapping or (value is sequence and value is not string) else (value | string) }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA = """\
{%- if tools %}{{- 'Environment: ipython\\nRespond with {"name": function name, "parameters": object}.\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at once!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|assistant|>{"name": "' + call.name + '", ' + '"parameters": ' + (call.arguments | tojson) + '}<|eot|>' }}
{%- else %}
{{- '<|' + (message.role if message.role != 'tool' else 'ipython') + '|>' + message.content + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

MISTRAL = """\
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9!') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
{%- endfor %}
{{- '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"call_id": "' + message.tool_call_id + '", "content": ' + message.content + '}[/TOOL_RESULTS]' }}
{%- else %}{{- message.content }}
{%- endif %}
{%- endfor %}"""

MISTRAL_NAMED = """\
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- else %}{{- '[INST]' + message.content + '[/INST]' }}
{%- endfor %}
{%- endfor %}
{#- [THINK]…[/THINK] may come first -#}"""

PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"

UNKNOWN_TOOLS = "{{ '<<' + (tools | tojson) + '>>' if tools else '' }}" + PLAIN

BY_FORMAT = {
    "hermes": QWEN,
    "qwen-xml": QWEN_CODER,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-named": MISTRAL_NAMED,
}


def tokenizer_with(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    """A tokenizer that knows one word, for its template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = template
    return tokenizer
