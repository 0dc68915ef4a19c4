"""What is known of a server before it is measured: the model's name, the fields it knows, what it adds to a prompt.

Found out by asking, with one request of one token; what is wrong with the address, the key or the model shows here.
"""

from dataclasses import dataclass, replace

from pydantic import BaseModel

from service.bench.endpoints import Chunk, streamed
from service.bench.errors import KEY_STATUS, BenchError
from service.bench.measuring import Outcome, measure
from service.bench.vocabulary import Tokenize, Vocabulary, find_vocabulary
from service.bench.workload import Job, Prompt
from service.client import ApiError, AsyncClient, BrokenAnswerError
from service.client.calls import Call, StreamCall, json_reader


class ModelName(BaseModel):
    """A model that is served."""

    id: str


class ModelNames(BaseModel):
    """Answer of GET /v1/models, as any server gives it."""

    data: list[ModelName]


@dataclass(frozen=True)
class Target:
    """A server that can be measured.

    Attributes:
        endpoint: the route to ask.
        model: the name to ask for.
        ignore_eos: whether it knows this field; without it answers may end early.
        include_usage: whether it knows this option; without it tokens are counted by chunks.
        vocabulary: words that are one token each.
        overhead: tokens that it puts around a prompt.
        as_text: prompts are texts.
    """

    endpoint: str
    model: str
    ignore_eos: bool
    include_usage: bool
    vocabulary: Vocabulary
    overhead: int
    as_text: bool

    def call(self, prompt: Prompt, max_tokens: int) -> StreamCall[Chunk]:
        """The request for one answer."""
        return streamed(
            self.endpoint,
            prompt,
            max_tokens,
            model=self.model,
            ignore_eos=self.ignore_eos,
            include_usage=self.include_usage,
        )


async def find_target(
    client: AsyncClient, tokenize: Tokenize, *, endpoint: str, model: str | None, as_text: bool
) -> Target:
    """Ask a server what has to be known of it.

    Raises:
        BenchError: it cannot be measured.
        ClientError: it cannot be asked.
    """
    name = model or await _first_model(client)
    vocabulary = await find_vocabulary(tokenize)
    prompt: Prompt = vocabulary.opener if as_text else list(vocabulary.token_ids[:1])
    for ignore_eos, include_usage in ((True, True), (False, True), (False, False)):
        target = Target(endpoint, name, ignore_eos, include_usage, vocabulary, 0, as_text)
        outcome = await measure(client, target.call(prompt, 1), Job(prompt, 1, 1))
        error = outcome.error
        if error is None:
            return replace(target, overhead=_overhead(outcome))
        if not (isinstance(error, ApiError) and error.status in (400, 422)):
            raise error
    raise BenchError(f"the server refuses even the plainest request: {error}")


async def _first_model(client: AsyncClient) -> str:
    try:
        call: Call[ModelNames] = Call("GET", "/v1/models", None, json_reader(ModelNames))
        names = (await client.send(call)).value
    except (ApiError, BrokenAnswerError) as error:
        if isinstance(error, ApiError) and error.status in KEY_STATUS:
            raise
        raise BenchError(f"the server does not say what it serves: name a --model ({error})") from error
    if not names.data:
        raise BenchError("the server serves no model")
    return names.data[0].id


def _overhead(outcome: Outcome) -> int:
    return 0 if outcome.usage is None else outcome.usage.prompt_tokens - 1
