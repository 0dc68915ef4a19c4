"""From a request's body to an admitted request: tokens, plan, sampling, queue. Knows no HTTP."""

import asyncio
from typing import TypeVar
from uuid import uuid4

from service.api.requests import ChatMessage, Prompt, RopeWishFields, SamplingFields
from service.api.state import Server
from service.build import LoadedServer
from service.core import SamplingParams
from service.engine.handle import RequestHandle
from service.errors import ContextLengthError, RequestError
from service.scaling.policy import PlanChoice, RopeWish

T = TypeVar("T")


async def admit(
    server: Server,
    prompt: Prompt,
    fields: SamplingFields,
    *,
    id_prefix: str,
    max_tokens: int | None,
    add_special_tokens: bool = True,
) -> RequestHandle:
    """Check a request, choose its plan and put it into the queue.

    Args:
        server: the server; must be ready.
        prompt: text, or token ids.
        fields: the request's body.
        id_prefix: what the request's id begins with.
        max_tokens: what the request asks for, under whichever name it has on its route.
        add_special_tokens: whether text gets what the tokenizer puts around it; a rendered chat has it already.

    Raises:
        RequestError: the request is refused; it was not admitted.
    """
    loaded = server.require_loaded()
    loaded.engine.ensure_room()
    token_ids = await tokenize(server, prompt, add_special_tokens=add_special_tokens)
    choice = choose_plan(server, len(token_ids), max_tokens, fields.rope)
    sampling = _sampling(fields, choice, loaded)
    return RequestHandle(loaded.engine, server.mailbox, f"{id_prefix}-{uuid4().hex}", token_ids, choice, sampling)


async def tokenize(server: Server, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a prompt, off the event loop: a long text takes a while.

    Raises:
        ContextLengthError: the text is so long that its tokens need not be counted.
        RequestError: a token id is out of range, or the prompt has no tokens.
    """
    loaded = server.require_loaded()
    if isinstance(prompt, str):
        _check_text_length(prompt, loaded, server.inspected.policy.max_length)
        # Of the tokenizer's methods, this one lets other threads run meanwhile.
        [encoding] = await asyncio.to_thread(
            loaded.tokenizer.backend_tokenizer.encode_batch_fast, [prompt], add_special_tokens=add_special_tokens
        )
        if not encoding.ids:
            raise RequestError("prompt: the text has no tokens", param="prompt")
        return list(encoding.ids)
    check_token_ids(prompt, loaded, param="prompt")
    return prompt


def render_chat(server: Server, messages: list[ChatMessage]) -> str:
    """A conversation as the model's chat template writes it.

    Raises:
        RequestError: the model has no template, or its template refuses the messages.
    """
    tokenizer = server.require_loaded().tokenizer
    if tokenizer.chat_template is None:
        raise RequestError(f"{server.inspected.name} has no chat template: use /v1/completions", param="messages")
    try:
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in messages], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is the model's own little program and can fail in any way
        raise RequestError(f"messages: the model's chat template refuses them: {error}", param="messages") from error
    assert isinstance(text, str)
    return text


def check_token_ids(token_ids: list[int], loaded: LoadedServer, *, param: str) -> None:
    """Refuse token ids that the model does not have."""
    largest = max(token_ids, default=0)
    if largest >= loaded.vocabulary:
        message = f"{param}: token id {largest} is out of range; the vocabulary has {loaded.vocabulary}"
        raise RequestError(message, param=param)


def _check_text_length(text: str, loaded: LoadedServer, max_length: int) -> None:
    """Refuse a text that cannot fit however well its tokens cover it."""
    if loaded.longest_token is None:
        return
    least = len(text.encode()) // loaded.longest_token
    if least >= max_length:
        message = f"the prompt has at least {least} tokens; the maximum length is {max_length}"
        raise ContextLengthError(message, param="prompt")


def choose_plan(server: Server, prompt_tokens: int, max_tokens: int | None, wish: RopeWishFields | None) -> PlanChoice:
    """What the policy chooses.

    Raises:
        ContextLengthError, WishError: see `Policy.choose`.
    """
    wished = None if wish is None else RopeWish(**wish.model_dump())
    return server.inspected.policy.choose(prompt_tokens, max_tokens, wished)


def _sampling(fields: SamplingFields, choice: PlanChoice, loaded: LoadedServer) -> SamplingParams:
    """The request's own values, then the model's, then none."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > choice.max_tokens:
        message = f"min_tokens is {min_tokens}; at most {choice.max_tokens} tokens can be generated"
        raise RequestError(message, param="min_tokens")
    model = loaded.generation
    return SamplingParams(
        max_tokens=choice.max_tokens,
        min_tokens=min_tokens,
        temperature=_first(fields.temperature, model.temperature, 1.0),
        top_k=_first(fields.top_k, model.top_k, 0),
        top_p=_first(fields.top_p, model.top_p, 1.0),
        min_p=_first(fields.min_p, model.min_p, 0.0),
        seed=fields.seed,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        end_token_ids=frozenset() if fields.ignore_eos else model.end_token_ids,
    )


def _first(asked: T | None, model: T | None, otherwise: T) -> T:
    if asked is not None:
        return asked
    return model if model is not None else otherwise
