"""From a request's body to how it begins: its tokens' pages and the plan that it will get.

Reads bodies with the API's own models and chooses plans with the server's own policy, so that it says what the replica
will do. What it cannot read has no beginning: any replica will say what is wrong with it.
"""

from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from model_patches.loading.cache import default_cache_dir
from model_patches.loading.load import load_tokenizer
from model_patches.loading.source import resolve_model
from service.api.admission import check_text_length, choose_within, encode
from service.api.chatting import max_tokens_of, render
from service.api.requests import ChatRequest, CompletionRequest, GenerateRequest
from service.build import longest_token_bytes, read_policy, use_chat_template
from service.cache.prefix import extend_digests
from service.chat.template import ChatTemplate
from service.errors import RequestError
from service.replicas.placing import Beginning
from service.scaling.fixed import AnyPolicy, FixedPolicy
from service.scaling.policy import PlanChoice
from service.settings import Settings

BODIES: dict[str, type[GenerateRequest | CompletionRequest | ChatRequest]] = {
    "/generate": GenerateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
"""The bodies of the routes that generate."""
PAGE_TOKENS = 16  # in which beginnings are compared, whatever the pages of the cache


class BeginningReader:
    """Reads how requests to one model begin."""

    def __init__(self, settings: Settings, policy: AnyPolicy, tokenizer: PreTrainedTokenizerFast) -> None:
        self._settings = settings
        self._policy = policy
        self._tokenizer = tokenizer.backend_tokenizer
        self._template = ChatTemplate(tokenizer)
        self._longest_token = longest_token_bytes(self._tokenizer)

    async def read(self, path: str, body: bytes) -> Beginning | None:
        """How a request begins; of one with several prompts the first.

        Returns:
            None where it generates nothing, or is one that will be refused.
        """
        if path not in BODIES:
            return None
        try:
            request = BODIES[path].model_validate_json(body)
            return self._beginning(await self._tokens(request), request)
        except (ValidationError, RequestError):
            return None

    async def _tokens(self, request: GenerateRequest | CompletionRequest | ChatRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            text = await render(self._template, request.messages, request, tells_tools=bool(request.told_tools))
            return await self._encode(text, add_special_tokens=False)
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._encode(prompt, add_special_tokens=True)
        return [token for token in prompt if isinstance(token, int)]

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        check_text_length(text, self._longest_token, self._policy.max_length)
        return await encode(text, self._tokenizer, add_special_tokens=add_special_tokens)

    def _beginning(
        self, tokens: list[int], request: GenerateRequest | CompletionRequest | ChatRequest
    ) -> Beginning | None:
        if not tokens:
            return None
        asked = max_tokens_of(request) if isinstance(request, ChatRequest) else request.max_tokens
        choice = choose_within(self._policy, self._settings.max_output_tokens, len(tokens), asked, request.rope)
        digests: list[bytes] = []
        extend_digests(digests, tokens, PAGE_TOKENS)
        return Beginning(
            tuple(digests),
            choice.plan.fingerprint.encode(),
            any_plan=choice.prefix_reuse == "rerotate",
            long_tokens=self._long_tokens(len(tokens), choice),
        )

    def _long_tokens(self, prompt_tokens: int, choice: PlanChoice) -> int:
        policy = self._policy
        if isinstance(policy, FixedPolicy) or choice.plan == policy.plan(None, policy.rungs[0]):
            return 0
        return prompt_tokens + min(choice.max_tokens, self._policy.options.reserve)


def beginning_reader(settings: Settings) -> BeginningReader:
    """A reader for the model that the settings name; loads its tokenizer and none of its weights.

    Raises:
        StartupError, ModelError: the files cannot be read.
    """
    folder = resolve_model(
        settings.model,
        cache_dir=default_cache_dir(),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
    use_chat_template(tokenizer, settings)
    return BeginningReader(settings, read_policy(settings), tokenizer)
