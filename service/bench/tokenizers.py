"""Where token ids come from: the server's own /tokenize, or a tokenizer that is here."""

from pathlib import Path

from service.bench.errors import KEY_STATUS, BenchError
from service.bench.vocabulary import Tokenize
from service.client import ApiError, AsyncClient, BrokenAnswerError


def tokenizer_of(client: AsyncClient, path: str | None) -> Tokenize:
    """How texts become tokens.

    Args:
        client: of the server, asked where `path` is None.
        path: a `tokenizer.json`, a folder that has one, or a model's name on the hub.

    Raises:
        BenchError: the path leads nowhere; from the function, the server has no /tokenize.
    """
    return _remote(client) if path is None else _local(path)


def _remote(client: AsyncClient) -> Tokenize:
    async def tokenize(text: str) -> list[int]:
        try:
            return (await client.tokenize(prompt=text, add_special_tokens=False)).tokens
        except (ApiError, BrokenAnswerError) as error:
            if isinstance(error, ApiError) and error.status in KEY_STATUS:
                raise
            raise BenchError(f"the server has no /tokenize that could be used: name a --tokenizer ({error})") from error

    return tokenize


def _local(path: str) -> Tokenize:
    from tokenizers import Tokenizer  # only here: a server that tokenises itself needs none

    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(path)
    except Exception as error:  # the library raises nothing narrower
        raise BenchError(f"--tokenizer {path}: {error}") from error

    async def tokenize(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    return tokenize
