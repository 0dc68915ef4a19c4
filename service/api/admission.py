"""From a request's body to an admitted request: tokens, plan, sampling, queue. Knows no HTTP."""

import asyncio
from dataclasses import replace
from typing import TypeVar

from service.api.auth import caller
from service.api.constraints import constraint_of
from service.api.requests import ChatMessage, Prompt, RopeWishFields, SamplingFields
from service.api.state import Server
from service.build import LoadedServer
from service.core import SamplingParams
from service.engine.handle import RequestHandle
from service.errors import ContextLengthError, RequestError
from service.logs import request_id
from service.scaling.policy import PlanChoice, RopeWish

T = TypeVar("T")


async def admit(
    server: Server,
    prompt: Prompt,
    fields: SamplingFields,
    *,
    id_prefix: str,
    max_tokens: int | None,
    logprobs: int | None,
    add_special_tokens: bool = True,
) -> RequestHandle:
    """Check a request, choose its plan and put it into the queue.

    Args:
        server: the server; must be ready.
        prompt: text, or token ids.
        fields: the request's body.
        id_prefix: what the request's id begins with.
        max_tokens: what the request asks for, under whichever name it has on its route.
        logprobs: likeliest tokens that are told beside each token, None for no log-probabilities.
        add_special_tokens: whether text gets what the tokenizer puts around it; a rendered chat has it already.

    Raises:
        RequestError: the request is refused; it was not admitted.
    """
    loaded, since = server.require_loaded(), asyncio.get_running_loop().time()
    timeout = _timeout(fields.timeout, server.settings.request_timeout_seconds)
    server.traffic.ensure_room(loaded.engine, caller.get())
    constraint = constraint_of(fields)
    token_ids = await tokenize(server, prompt, add_special_tokens=add_special_tokens)
    choice = choose_plan(server, len(token_ids), max_tokens, fields.rope)
    sampling = _sampling(fields, choice, loaded, logprobs)
    if constraint is not None:
        grammar = await asyncio.to_thread(loaded.grammars.compile, constraint.spec, param=constraint.param)
        sampling = replace(sampling, grammar=grammar)
    server.traffic.ensure_room(loaded.engine, caller.get())  # again: others may have come meanwhile
    name = f"{id_prefix}-{request_id.get()}"
    handle = RequestHandle(loaded.engine, server.mailbox, name, token_ids, choice, sampling)
    server.traffic.add(handle, caller.get())
    if timeout is not None:
        handle.end_within(timeout, since=since)
    return handle


def _timeout(asked: float | None, longest: float | None) -> float | None:
    """How long a request may take: what it asks for, within what the server allows."""
    if asked is not None and longest is not None and asked > longest:
        raise RequestError(f"timeout: at most {longest:g} seconds are allowed, it is {asked:g}", param="timeout")
    return longest if asked is None else asked


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


def _sampling(
    fields: SamplingFields,
    choice: PlanChoice,
    loaded: LoadedServer,
    logprobs: int | None,
) -> SamplingParams:
    """The request's own values, then the model's, then none."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > choice.max_tokens:
        message = f"min_tokens is {min_tokens}; at most {choice.max_tokens} tokens can be generated"
        raise RequestError(message, param="min_tokens")
    check_token_ids(list(fields.logit_bias or {}), loaded, param="logit_bias")
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
        logit_bias=fields.logit_bias or {},
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, model.repetition_penalty, 1.0),
        logprobs=logprobs,
    )


def _first(asked: T | None, model: T | None, otherwise: T) -> T:
    if asked is not None:
        return asked
    return model if model is not None else otherwise
