"""Answers of the API as a server writes them, with a field in each that no client knows yet."""

from typing import Any

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 0, "new": 1},
    "new": 1,
}
ROPE = {
    "scheme": "default",
    "mode": "native",
    "factor": 1.0,
    "growth": "stop",
    "prefix_reuse": "same-plan",
    "reason": "it fits",
    "rerotations": 0,
    "other_plan_prefix_tokens": 0,
    "native_length": 64,
    "plan_max_length": 64,
    "new": 1,
}
TIMING = dict.fromkeys(
    ("queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds", "total_seconds"), 0.5
)
GENERATE = {
    "id": "gen-1",
    "model": "m",
    "text": " Paris",
    "token_ids": [1, 2],
    "finish_reason": "length",
    "usage": USAGE,
    "rope": ROPE,
    "timing": TIMING,
    "new": 1,
}
GENERATE_CHUNK = {"id": "gen-1", "text": " Pa", "token_ids": [1], "finish_reason": None, "new": 1}


def completion(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "new": 1}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "choices": [{**choice, "rope": ROPE}], "new": 1, **more}


def chat_chunk(content: str) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": [{"index": 0, "delta": {"content": content, "new": 1}}], "new": 1}


CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "new": 1},
            "finish_reason": "stop",
            "rope": ROPE,
        }
    ],
    "usage": USAGE,
    "rope": ROPE,
    "new": 1,
}
CARD = {
    "id": "m",
    "object": "model",
    "created": 1,
    "owned_by": "ropewalk",
    "max_model_len": 256,
    "native_length": 64,
    "rope_schemes": ["default", "yarn"],
    "rope_factors": [1.0, 2.0],
    "new": 1,
}
PLAN = {
    "scheme": "yarn",
    "mode": "static",
    "factor": 2.0,
    "growth": "rerotate",
    "prefix_reuse": "same-plan",
    "reason": "it is long",
    "prompt_tokens": 100,
    "max_tokens": 10,
    "native_length": 64,
    "max_length": 256,
    "plan_max_length": 128,
    "attention_factor": 1.07,
    "inv_freq": [1.0, 0.1],
    "rungs": [{"scheme": "yarn", "factor": 2.0, "max_length": 128, "new": 1}],
    "ladder": [],
    "local": None,
    "pairs": [],
    "new": 1,
}
