"""Words of one token are found, and prompts of them have the length that they should."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from service.bench.errors import BenchError
from service.bench.lengths import parse_lengths
from service.bench.tokenizers import tokenizer_of
from service.bench.vocabulary import COMMON, Vocabulary, find_vocabulary
from service.bench.workload import Workload
from service.client import AsyncClient
from tests.service.bench.fake_server import PAIRS, tokens_of


def test_words_of_two_tokens_are_left_out_and_all_others_are_in() -> None:
    questions = []

    async def tokenize(text: str) -> list[int]:
        questions.append(text)
        return tokens_of(text)

    vocabulary = asyncio.run(find_vocabulary(tokenize))
    assert set(vocabulary.words) == set(COMMON.split()) - set(PAIRS)
    assert [tokens_of(word) for word in vocabulary.words] == [[number] for number in vocabulary.token_ids]
    assert tokens_of(vocabulary.opener) == tokens_of("the")
    assert len(questions) < 50  # about 399 words


def test_an_opener_of_two_tokens_is_passed_over() -> None:
    async def tokenize(text: str) -> list[int]:
        return tokens_of(text) if text != "the" else [1, 2]

    assert asyncio.run(find_vocabulary(tokenize)).opener == "a"


@pytest.mark.parametrize("tokens_per_word", [0, 2])
def test_a_tokenizer_without_such_words_is_refused(tokens_per_word: int) -> None:
    async def tokenize(text: str) -> list[int]:
        return [5] * (tokens_per_word * len(text.split()) + (text == "the"))

    with pytest.raises(BenchError, match="too few English words"):
        asyncio.run(find_vocabulary(tokenize))


def test_common_words_are_there_once() -> None:
    words = COMMON.split()
    assert len(set(words)) == len(words)


async def find_here(path: str) -> Vocabulary:
    async with AsyncClient("http://nowhere.test") as client:
        return await find_vocabulary(tokenizer_of(client, path))


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_texts_of_a_real_tokenizer_have_their_exact_length(embedded_model_folder: Path, file: str) -> None:
    vocabulary = asyncio.run(find_here(str(embedded_model_folder / file)))
    assert len(vocabulary.words) > 300
    lengths = parse_lengths("20:400")
    workload = Workload(vocabulary, lengths, parse_lengths("1"), shared_prefix_tokens=9, overhead=0, as_text=True)
    tokenizer = Tokenizer.from_file(str(embedded_model_folder / "tokenizer.json"))
    for job in workload.jobs(30, seed=1):
        assert len(tokenizer.encode(job.prompt).ids) == job.prompt_tokens
        assert isinstance(job.prompt, str)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BenchError, match=f"--tokenizer {tmp_path}"):
        asyncio.run(find_here(str(tmp_path)))
