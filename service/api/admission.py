"""From a request's body to an admitted request: tokens, plan, sampling, queue. Knows no HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tokenizers import Tokenizer

from service.api import limits
from service.api.auth import caller
from service.api.constraints import Constraint
from service.api.requests import Prompt, RopeWishFields, SamplingFields
from service.api.state import Server
from service.build import LoadedServer
from service.core import SamplingParams
from service.engine.handle import Choice, RequestHandle
from service.errors import ContextLengthError, RequestError
from service.logs import request_id
from service.scaling.fixed import AnyPolicy
from service.scaling.policy import PlanChoice, RopeWish

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """What a route asks to be generated.

    Attributes:
        id_prefix: what the request's id begins with.
        fields: the request's body.
        num_prompts: how many prompts `read_prompts` will return.
        read_prompts: does the work of turning them into token ids; called once there is room for the request.
        max_tokens: what the request asks for, under whichever name it has on its route.
        n: choices of each prompt.
        logprobs: likeliest tokens that are told beside each token, None for no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        constraint: says, once the prompts have been read, what the text must match.
        visible_tokens: special tokens that are part of the text.
    """

    id_prefix: str
    fields: SamplingFields
    num_prompts: int
    read_prompts: Callable[[], Awaitable[list[list[int]]]]
    max_tokens: int | None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Callable[[], Constraint | None] = lambda: None
    visible_tokens: frozenset[int] = frozenset()


async def admit(server: Server, order: Order) -> RequestHandle:
    """Check a request, choose the plans of its prompts and put it into the queue.

    Args:
        server: the server; must be ready.
        order: the request.

    Returns:
        The request; its choices come prompt by prompt.

    Raises:
        RequestError: the request is refused; it was not admitted.
    """
    loaded, since = server.require_loaded(), asyncio.get_running_loop().time()
    settings, fields, choices = server.settings, order.fields, order.num_prompts * order.n
    timeout = _timeout(fields.timeout, settings.request_timeout_seconds)
    limits.check_fields(settings, fields, max_tokens=order.max_tokens, choices=choices)
    server.traffic.ensure_room(loaded.engine, caller.get(), choices)
    prompts = await order.read_prompts()
    planned = [_plan(server, order, prompt) for prompt in prompts]
    if (constraint := order.constraint()) is not None:
        spec, param = constraint
        grammar = await asyncio.wrap_future(loaded.grammars.begin(spec, param=param))
        planned = [choice._replace(sampling=replace(choice.sampling, grammar=grammar)) for choice in planned]
    server.traffic.ensure_room(loaded.engine, caller.get(), choices)  # again: others may have come meanwhile
    name = f"{order.id_prefix}-{request_id.get()}"
    every = [_nth(choice, number) for choice in planned for number in range(order.n)]
    handle = RequestHandle(loaded.engine, server.mailbox, name, every)
    server.traffic.add(handle, caller.get())
    server.metrics.request_n.observe(order.n)
    if timeout is not None:
        handle.end_within(timeout, since=since)
    return handle


def _plan(server: Server, order: Order, prompt: list[int]) -> Choice:
    """What is generated after one prompt."""
    limits.check_prompt(server.settings, len(prompt))
    choice = choose_plan(server, len(prompt), order.max_tokens, order.fields.rope)
    return Choice(prompt, choice, _sampling(order, choice, server.require_loaded()))


def _nth(choice: Choice, number: int) -> Choice:
    """One of several choices of a prompt; each has a random stream of its own."""
    seed = choice.sampling.seed
    if number == 0 or seed is None:
        return choice
    return choice._replace(sampling=replace(choice.sampling, seed=seed + number))


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
        check_text_length(prompt, loaded.longest_token, server.inspected.policy.max_length)
        return await encode(prompt, loaded.tokenizer.backend_tokenizer, add_special_tokens=add_special_tokens)
    check_token_ids(prompt, loaded, param="prompt")
    return prompt


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    """The same of a text that is not too long.

    Raises:
        RequestError: it has no tokens.
    """
    # Of the tokenizer's methods, this one lets other threads run meanwhile.
    [encoding] = await asyncio.to_thread(tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
    if not encoding.ids:
        raise RequestError("prompt: the text has no tokens", param="prompt")
    return list(encoding.ids)


def check_token_ids(token_ids: list[int], loaded: LoadedServer, *, param: str) -> None:
    """Refuse token ids that the model does not have."""
    largest = max(token_ids, default=0)
    if largest >= loaded.vocabulary:
        message = f"{param}: token id {largest} is out of range; the vocabulary has {loaded.vocabulary}"
        raise RequestError(message, param=param)


def check_text_length(text: str, longest_token: int | None, max_length: int) -> None:
    """Refuse a text that cannot fit however well its tokens cover it.

    Args:
        text: of a prompt.
        longest_token: bytes that one token stands for at most, see `longest_token_bytes`.
        max_length: tokens.

    Raises:
        ContextLengthError: the message says how many tokens it has at least.
    """
    if longest_token is None:
        return
    least = len(text.encode()) // longest_token
    if least >= max_length:
        message = f"the prompt has at least {least} tokens; the maximum length is {max_length}"
        raise ContextLengthError(message, param="prompt")


def choose_plan(server: Server, prompt_tokens: int, max_tokens: int | None, wish: RopeWishFields | None) -> PlanChoice:
    """What the policy chooses; without max_tokens, for no more than the server allows.

    Raises:
        ContextLengthError, WishError: see `Policy.choose`.
    """
    return choose_within(server.inspected.policy, server.settings.max_output_tokens, prompt_tokens, max_tokens, wish)


def choose_within(
    policy: AnyPolicy, most: int | None, prompt_tokens: int, max_tokens: int | None, wish: RopeWishFields | None
) -> PlanChoice:
    """The same, of a policy alone; `most` is what a request may generate where the server limits it."""
    wished = None if wish is None else RopeWish(**wish.model_dump())
    choice = policy.choose(prompt_tokens, max_tokens, wished)
    if max_tokens is None and most is not None and choice.max_tokens > most:
        return policy.choose(prompt_tokens, most, wished)
    return choice


def _sampling(order: Order, choice: PlanChoice, loaded: LoadedServer) -> SamplingParams:
    """The request's own values, then the model's, then none."""
    fields, model = order.fields, loaded.generation
    min_tokens = fields.min_tokens or 0
    if min_tokens > choice.max_tokens:
        message = f"min_tokens is {min_tokens}; at most {choice.max_tokens} tokens can be generated"
        raise RequestError(message, param="min_tokens")
    check_token_ids(list(fields.logit_bias or {}), loaded, param="logit_bias")
    check_token_ids(fields.stop_token_ids or [], loaded, param="stop_token_ids")
    own_ends = frozenset() if fields.ignore_eos else model.end_token_ids
    return SamplingParams(
        max_tokens=choice.max_tokens,
        min_tokens=min_tokens,
        temperature=_first(fields.temperature, model.temperature, 1.0),
        top_k=_first(fields.top_k, model.top_k, 0),
        top_p=_first(fields.top_p, model.top_p, 1.0),
        min_p=_first(fields.min_p, model.min_p, 0.0),
        seed=fields.seed,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        end_token_ids=own_ends.union(fields.stop_token_ids or ()),
        logit_bias=fields.logit_bias or {},
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, model.repetition_penalty, 1.0),
        logprobs=order.logprobs,
        prompt_logprobs=order.prompt_logprobs,
        visible_token_ids=order.visible_tokens,
    )


def _first(asked: T | None, model: T | None, otherwise: T) -> T:
    if asked is not None:
        return asked
    return model if model is not None else otherwise
