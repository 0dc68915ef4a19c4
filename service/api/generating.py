"""The three routes that generate: /generate, /v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission import admit, render_chat
from service.api.answers import ChatFormat, CompletionFormat, GenerateFormat
from service.api.errors import ERRORS
from service.api.logprobs import LogprobShapes
from service.api.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    StreamOptions,
)
from service.api.respond import respond
from service.api.responses import (
    ChatResponse,
    CompletionResponse,
    GenerateResponse,
)
from service.api.state import Server, ServerDep
from service.errors import RequestError

router = APIRouter(tags=["generation"], responses=ERRORS)


@router.post("/generate", response_model=GenerateResponse)
async def generate(body: GenerateRequest, request: Request, server: ServerDep) -> Response:
    """Generate text after a prompt: the server's own shape, with timing and token ids."""
    server.check_model(body.model)
    answer = GenerateFormat(_logprob_shapes(server))
    handle = await admit(server, body.prompt, body, id_prefix="gen", max_tokens=body.max_tokens, logprobs=body.logprobs)
    return await respond(request, server, handle, answer, stream=bool(body.stream))


@router.post("/v1/completions", response_model=CompletionResponse)
async def completions(body: CompletionRequest, request: Request, server: ServerDep) -> Response:
    """Generate text after a prompt, in OpenAI's shape."""
    server.check_model(body.model)
    answer = CompletionFormat(_logprob_shapes(server), include_usage=_include_usage(body.stream_options, body.stream))
    handle = await admit(
        server, body.prompt, body, id_prefix="cmpl", max_tokens=body.max_tokens, logprobs=body.logprobs
    )
    return await respond(request, server, handle, answer, stream=bool(body.stream))


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def chat(body: ChatRequest, request: Request, server: ServerDep) -> Response:
    """Answer a conversation, in OpenAI's shape."""
    server.check_model(body.model)
    answer = ChatFormat(_logprob_shapes(server), include_usage=_include_usage(body.stream_options, body.stream))
    prompt, max_tokens, logprobs = render_chat(server, body.messages), _max_tokens(body), _logprobs(body)
    try:
        handle = await admit(
            *(server, prompt, body),
            id_prefix="chatcmpl",
            max_tokens=max_tokens,
            logprobs=logprobs,
            add_special_tokens=False,
        )
    except RequestError as error:
        newer = body.max_completion_tokens is not None
        names = {"prompt": "messages", "max_tokens": "max_completion_tokens" if newer else "max_tokens"}
        error.param = names.get(error.param or "", error.param)
        raise
    return await respond(request, server, handle, answer, stream=bool(body.stream))


def _include_usage(options: StreamOptions | None, stream: bool | None) -> bool:
    if options is not None and not stream:
        raise RequestError("stream_options goes only with stream: true", param="stream_options")
    return options is not None and bool(options.include_usage)


def _logprob_shapes(server: Server) -> LogprobShapes:
    return LogprobShapes(server.require_loaded().tokenizer.backend_tokenizer)


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes only with logprobs: true", param="top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None


def _max_tokens(body: ChatRequest) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: give one",
            param="max_completion_tokens",
        )
    return body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
