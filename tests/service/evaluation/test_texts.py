"""Texts and documents."""

from pathlib import Path

import pytest

from service.evaluation.errors import EvaluationError
from service.evaluation.texts import builtin_text, documents, name_of, read_texts, tokenize
from tests.serving import byte_tokenizer


def test_the_built_in_text_is_long_and_always_the_same() -> None:
    text = builtin_text()
    assert len(text.content) > 300_000
    assert text == builtin_text()
    assert "expression" in text.content


def test_each_file_is_a_text_and_no_file_is_the_built_in_one(tmp_path: Path) -> None:
    for name, content in (("a.txt", "first"), ("b.txt", "sécond")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    texts = read_texts([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert [(text.name, text.content) for text in texts] == [("a.txt", "first"), ("b.txt", "sécond")]
    assert read_texts([]) == [builtin_text()]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"none\.txt"):
        read_texts([tmp_path / "none.txt"])
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(EvaluationError, match="utf-8"):
        read_texts([tmp_path / "bytes.txt"])


def test_token_ids_have_no_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("Hi!")
    assert tokenize(read_texts([tmp_path / "a"]), byte_tokenizer().backend_tokenizer) == [list(b"Hi!")]


def test_documents_are_exact_never_overlap_and_never_cross_texts() -> None:
    streams = [list(range(0, 25)), list(range(100, 109)), list(range(200, 230))]
    assert documents(streams, 10, 99) == [
        *(list(range(start, start + 10)) for start in (0, 10, 200, 210, 220)),
    ]


def test_fewer_documents_come_from_all_over() -> None:
    starts = [document[0] for document in documents([list(range(100))], 10, 3)]
    assert starts == [0, 30, 60]
    assert documents([list(range(100))], 10, 3) == documents([list(range(100))], 10, 3)


def test_a_text_that_is_too_short_is_refused_with_its_length() -> None:
    with pytest.raises(EvaluationError, match="11 tokens that a document needs, the longest has 10"):
        documents([[1] * 10, [2] * 3], 11, 1)


def test_documents_are_told_apart() -> None:
    assert len({name_of(tokens) for tokens in ([1, 23], [12, 3], [1, 2, 3], [1, 23, 0], [])}) == 5
    assert name_of([1, 2]) == name_of(iter([1, 2]))
