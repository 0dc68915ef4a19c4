"""How requests begin, from their bodies: against the tokens and plans of the server itself."""

import asyncio
import json
from typing import Any

import pytest

from service.cache.prefix import extend_digests
from service.replicas.beginning import PAGE_TOKENS, BeginningReader
from service.replicas.placing import Beginning
from service.scaling.policy import Policy
from service.settings import Settings
from tests.fakes import GEOMETRY
from tests.serving import byte_tokenizer

NATIVE_LENGTH = GEOMETRY.native_length  # 64; at most four times as much
TEXT = "All animals are equal, but some are more equal."


def read(path: str, body: Any, *, policy: Policy | None = None, **settings: Any) -> Beginning | None:
    reader = BeginningReader(Settings(**settings), policy or Policy(GEOMETRY), byte_tokenizer())
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(reader.read(path, content))


def found(path: str, body: Any, **options: Any) -> Beginning:
    beginning = read(path, body, **options)
    assert beginning is not None
    return beginning


def digests_of(text: str) -> tuple[bytes, ...]:
    digests: list[bytes] = []
    extend_digests(digests, byte_tokenizer().backend_tokenizer.encode(text).ids, PAGE_TOKENS)
    return tuple(digests)


def test_full_pages_of_the_prompts_tokens_count() -> None:
    assert len(digests_of(TEXT)) == len(TEXT) // PAGE_TOKENS == 2
    assert found("/generate", {"prompt": TEXT, "max_tokens": 5}).digests == digests_of(TEXT)
    assert found("/v1/completions", {"prompt": TEXT, "max_tokens": 5}).digests == digests_of(TEXT)


def test_token_ids_are_taken_as_they_are() -> None:
    ids = byte_tokenizer().backend_tokenizer.encode(TEXT).ids
    assert found("/generate", {"prompt": ids, "max_tokens": 5}).digests == digests_of(TEXT)


def test_of_several_prompts_the_first_counts() -> None:
    assert found("/v1/completions", {"prompt": [TEXT, "other"], "max_tokens": 5}).digests == digests_of(TEXT)


def test_a_chat_is_what_the_template_makes_of_it() -> None:
    messages = [{"role": "user", "content": TEXT}]
    written = f"<user>{TEXT}<assistant>"
    beginning = found("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 5})
    assert beginning.digests == digests_of(written)


def test_the_plan_is_the_policys() -> None:
    native = found("/generate", {"prompt": TEXT, "max_tokens": 5})
    dynamic = found("/generate", {"prompt": TEXT, "max_tokens": 150})  # starts native
    static = found("/generate", {"prompt": TEXT * 2, "max_tokens": 5})
    asked = found("/generate", {"prompt": TEXT, "max_tokens": 5, "rope": {"scheme": "yarn", "factor": 4}})
    assert native.plan == dynamic.plan
    assert len({native.plan, static.plan, asked.plan}) == 3
    assert (native.long_tokens, dynamic.long_tokens) == (0, 0)
    assert static.long_tokens == 2 * len(TEXT) + 5
    assert asked.long_tokens == len(TEXT) + 5


def test_what_a_long_request_comes_to_hold_ends_at_the_reserve() -> None:
    policy = Policy(GEOMETRY, reserve=7)
    assert found("/generate", {"prompt": TEXT * 2, "max_tokens": 50}, policy=policy).long_tokens == 2 * len(TEXT) + 7
    limited = found("/generate", {"prompt": TEXT * 2}, max_output_tokens=3)
    assert limited.long_tokens == 2 * len(TEXT) + 3


def test_pages_of_other_plans_count_where_they_are_used() -> None:
    assert not found("/generate", {"prompt": TEXT, "max_tokens": 5}).any_plan
    assert found("/generate", {"prompt": TEXT, "max_tokens": 5, "rope": {"prefix_reuse": "rerotate"}}).any_plan


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT}),
        ("/generate", b"{"),
        ("/generate", {"prompt": TEXT, "max_token": 5}),
        ("/generate", {"prompt": TEXT, "max_tokens": 1000}),
        ("/generate", {"prompt": "x" * 1000}),
        ("/generate", {"prompt": TEXT, "rope": {"scheme": "unknown"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    ],
)
def test_what_will_be_refused_has_no_beginning(path: str, body: Any) -> None:
    assert read(path, body) is None
