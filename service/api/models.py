"""Routes about the model: what is served, what a text's tokens are, which plan a request would get."""

from typing import Any

from fastapi import APIRouter

from service.api.admission import check_token_ids, choose_plan, tokenize
from service.api.chatting import render
from service.api.errors import ERRORS
from service.api.requests import DetokenizeRequest, PlanRequest, TemplateFields, TokenizeRequest
from service.api.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    PlanResponse,
    TokenizeResponse,
)
from service.api.state import Server, ServerDep
from service.errors import ContextLengthError, RequestError
from service.scaling.explain import explain

router = APIRouter(tags=["model"], responses={500: ERRORS[500]})
OF_A_BODY: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 408, 413, 503)}


@router.get("/v1/models")
async def models(server: ServerDep) -> ModelList:
    """The served model, with the lengths, schemes and factors that requests can use."""
    return ModelList(data=[_card(server)])


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]})
async def model(name: str, server: ServerDep) -> ModelCard:
    """The served model, by its name."""
    server.check_model(name)
    return _card(server)


def _card(server: Server) -> ModelCard:
    policy = server.inspected.policy
    return ModelCard(
        id=server.inspected.name,
        created=server.started,
        max_model_len=policy.max_length,
        native_length=policy.native_length,
        rope_schemes=list(policy.schemes),
        rope_factors=list(policy.ladder),
    )


@router.post("/tokenize", responses=OF_A_BODY)
async def tokenize_text(body: TokenizeRequest, server: ServerDep) -> TokenizeResponse:
    """The token ids of a text, or of a conversation as the model's chat template writes it."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give one of prompt and messages", param="prompt")
    _check_template_fields(body, with_messages=body.messages is not None)
    if body.messages is not None:
        text, special = await render(server.require_loaded().chat_template, body.messages, body), False
    else:
        text, special = body.prompt or "", body.add_special_tokens
    tokens = await tokenize(server, text, add_special_tokens=special) if text else []
    return TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=server.inspected.policy.max_length)


@router.post("/detokenize", responses=OF_A_BODY)
async def detokenize_tokens(body: DetokenizeRequest, server: ServerDep) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    loaded = server.require_loaded()
    max_length = server.inspected.policy.max_length
    if len(body.tokens) > max_length:
        raise ContextLengthError(f"{len(body.tokens)} tokens; the maximum length is {max_length}", param="tokens")
    check_token_ids(body.tokens, loaded, param="tokens")
    return DetokenizeResponse(prompt=loaded.tokenizer.backend_tokenizer.decode(body.tokens, skip_special_tokens=False))


@router.post("/v1/rope/plan", responses=OF_A_BODY)
async def rope_plan(body: PlanRequest, server: ServerDep) -> PlanResponse:
    """The plan that a request would get, and why, without running it."""
    try:
        tokens = await _prompt_tokens(server, body)
        choice = choose_plan(server, tokens, body.max_tokens, body.rope)
    except RequestError as error:
        if error.param == "prompt" and body.messages is not None:
            error.param = "messages"
        raise
    return PlanResponse(**explain(choice, server.inspected.policy, tokens))


def _check_template_fields(body: TemplateFields, *, with_messages: bool) -> None:
    """Refuse what only a chat template reads where there is no conversation."""
    given = next((name for name in TemplateFields.model_fields if getattr(body, name) is not None), None)
    if given is not None and not with_messages:
        raise RequestError(f"{given}: goes only with messages", param=given)


async def _prompt_tokens(server: Server, body: PlanRequest) -> int:
    given = [name for name in ("prompt", "messages", "prompt_tokens") if getattr(body, name) is not None]
    if len(given) != 1:
        message = f"give one of prompt, messages and prompt_tokens, not {' and '.join(given) or 'none'}"
        raise RequestError(message, param=given[1] if given else "prompt")
    _check_template_fields(body, with_messages=body.messages is not None)
    if body.prompt_tokens is not None:
        return body.prompt_tokens
    if body.messages is not None:
        text = await render(server.require_loaded().chat_template, body.messages, body)
        return len(await tokenize(server, text, add_special_tokens=False))
    assert body.prompt is not None
    return len(await tokenize(server, body.prompt, add_special_tokens=True))
