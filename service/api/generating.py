"""The three routes that generate: /generate, /v1/completions and /v1/chat/completions."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission import Order, admit, tokenize
from service.api.answers.completion import CompletionFormat, Pieces
from service.api.answers.generate import GenerateFormat
from service.api.chatting import Chat, max_tokens_of
from service.api.constraints import constraint_of
from service.api.errors import ERRORS
from service.api.logprobs import LogprobShapes
from service.api.requests import ChatRequest, CompletionRequest, GenerateRequest, OpenAIFields, Prompt
from service.api.respond import respond
from service.api.responses import ChatResponse, CompletionResponse, GenerateResponse
from service.api.state import Server, ServerDep
from service.engine.detokenize import pieces
from service.errors import RequestError

router = APIRouter(tags=["generation"], responses=ERRORS)


@router.post("/generate", response_model=GenerateResponse)
async def generate(body: GenerateRequest, request: Request, server: ServerDep) -> Response:
    """Generate text after a prompt: the server's own shape, with timing and token ids."""
    server.check_model(body.model)
    constraint = constraint_of(body)
    order = Order(
        id_prefix="gen",
        fields=body,
        num_prompts=1,
        read_prompts=lambda: _read(server, [body.prompt]),
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        constraint=lambda: constraint,
    )
    handle = await admit(server, order)
    answer = GenerateFormat(
        _logprob_shapes(server),
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    return await respond(request, server, handle, answer, stream=bool(body.stream))


@router.post("/v1/completions", response_model=CompletionResponse)
async def completions(body: CompletionRequest, request: Request, server: ServerDep) -> Response:
    """Generate text after a prompt, or after each of several, in OpenAI's shape."""
    server.check_model(body.model)
    include_usage, constraint = _include_usage(body), constraint_of(body)
    n, prompts = body.n or 1, _prompts(body)
    if body.best_of not in (None, n):
        message = f"best_of: texts are not ranked here, so it must be n, {n}; it is {body.best_of}"
        raise RequestError(message, param="best_of")
    echo: list[Pieces] = []

    async def read_prompts() -> list[list[int]]:
        token_ids = await _read(server, prompts)
        if body.echo:
            new_stream = server.require_loaded().new_text_stream
            echo.extend(await asyncio.to_thread(lambda: [pieces(new_stream(frozenset()), ids) for ids in token_ids]))
        return token_ids

    order = Order(
        id_prefix="cmpl",
        fields=body,
        num_prompts=len(prompts),
        read_prompts=read_prompts,
        max_tokens=body.max_tokens,
        n=n,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        constraint=lambda: constraint,
    )
    handle = await admit(server, order)
    shapes = None if body.logprobs is None else _logprob_shapes(server)
    answer = CompletionFormat(shapes, include_usage=include_usage, echo=echo)
    return await respond(request, server, handle, answer, stream=bool(body.stream), choices_per_prompt=n)


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def chat(body: ChatRequest, request: Request, server: ServerDep) -> Response:
    """Answer a conversation, in OpenAI's shape."""
    server.check_model(body.model)
    include_usage, n = _include_usage(body), body.n or 1
    conversation = Chat(server, body)
    order = Order(
        id_prefix="chatcmpl",
        fields=body,
        num_prompts=1,
        read_prompts=conversation.read_prompts,
        max_tokens=max_tokens_of(body),
        n=n,
        logprobs=_logprobs(body),
        constraint=conversation.constraint,
        visible_tokens=conversation.visible_tokens,
    )
    try:
        handle = await admit(server, order)
    except RequestError as error:
        newer = body.max_completion_tokens is not None
        names = {"prompt": "messages", "max_tokens": "max_completion_tokens" if newer else "max_tokens"}
        error.param = names.get(error.param or "", error.param)
        raise
    answer = conversation.answer(_logprob_shapes(server) if body.logprobs else None, include_usage=include_usage)
    return await respond(request, server, handle, answer, stream=bool(body.stream), choices_per_prompt=n)


async def _read(server: Server, prompts: list[Prompt]) -> list[list[int]]:
    return [await tokenize(server, prompt, add_special_tokens=True) for prompt in prompts]


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, which may have one or several."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    several = [prompt for prompt in body.prompt if not isinstance(prompt, int)]
    return several or [[token for token in body.prompt if isinstance(token, int)]]


def _include_usage(body: OpenAIFields) -> bool:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes only with stream: true", param="stream_options")
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _logprob_shapes(server: Server) -> LogprobShapes:
    return LogprobShapes(server.require_loaded().tokenizer.backend_tokenizer)


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes only with logprobs: true", param="top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None
