"""Text a token at a time: whole characters only, nothing lost or doubled; and stop strings however the text is cut."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from model_patches.loading.load import load_tokenizer
from service.engine.byte_level import ByteLevelDetokenizer
from service.engine.detokenize import MOST_PENDING, REPLACEMENT, Detokenizer, TextStream, text_streams

TEXTS = {
    "plain": "The quick brown fox, 12 times:\n\n  jumps\tover.",
    "emoji": "Fine 😀👍🏽 family 👨‍👩‍👧‍👦 flag 🇳🇱!",
    "cjk": "漢字とかな、한국어 그리고 中文。𠮷野家",
    "combining": "e\u0301 o\u0308\u0323 नमस्ते สวัสดี a\u0300\u0301\u0302",
    "right to left": "שלום عليكم",
    "leading space": "  indented",
    "digits": "x  12 3.14",
}


@pytest.fixture(scope="module")
def tokenizer(embedded_model_folder: Path) -> Tokenizer:
    backend: Tokenizer = load_tokenizer(embedded_model_folder).backend_tokenizer
    return backend


@pytest.fixture(scope="module")
def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece's: a few words, and a token for each byte, which decode in runs. Token b is byte b."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "a", "世", "。"]
    model = models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def added_tokens_tokenizer() -> Tokenizer:
    """Byte-level: a token for each byte, and added ones of several kinds, in letters that stand for bytes and in
    others. Tokens from 262 on do not exist."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["two words", "Ġletters", "日本", "é!"])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<call é>", "<end>", "Ġ")])
    return tokenizer


NewStream = Callable[[], TextStream]


@pytest.fixture(scope="module", params=["byte-level", "any"])
def new_stream(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> NewStream:
    """Makes the detokeniser of byte-level tokenizers, or the one that takes any."""
    streams = text_streams(tokenizer) if request.param == "byte-level" else partial(Detokenizer, tokenizer)
    return partial(streams, frozenset())


def pieces(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [stream.push(token_id) for token_id in token_ids]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_the_pieces_are_whole_characters_and_together_the_text(
    tokenizer: Tokenizer, new_stream: NewStream, text: str
) -> None:
    streamed = pieces(new_stream(), tokenizer.encode(text).ids)
    assert "".join(streamed) == text
    assert not any(REPLACEMENT in piece for piece in streamed)


def test_a_character_comes_with_its_last_token(tokenizer: Tokenizer, new_stream: NewStream) -> None:
    token_ids = tokenizer.encode("𠮷").ids
    assert len(token_ids) == 4
    assert pieces(new_stream(), token_ids) == ["", "", "", "𠮷"]


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=30))
def test_any_text_comes_through(tokenizer: Tokenizer, new_stream: NewStream, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    assume(tokenizer.decode(token_ids) == text)  # this vocabulary lacks a few rare bytes
    streamed = pieces(new_stream(), token_ids)
    assert "".join(streamed) == text
    assert not any(REPLACEMENT in piece for piece in streamed)


def test_special_tokens_produce_nothing(tokenizer: Tokenizer, new_stream: NewStream) -> None:
    start, end = tokenizer.encode("<|im_start|><|im_end|>").ids
    word, other = tokenizer.encode("word").ids, tokenizer.encode(" other").ids
    assert "".join(pieces(new_stream(), [start, *word, end, start, *other, end])) == "word other"
    assert pieces(new_stream(), [start, end, end]) == ["", "", ""]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_bytes_of_a_character_that_is_never_completed_are_dropped(
    tokenizer: Tokenizer, new_stream: NewStream, kept: int
) -> None:
    stream = new_stream()
    streamed = pieces(stream, tokenizer.encode("abc").ids + tokenizer.encode("𠮷").ids[:kept])
    assert "".join(streamed) + stream.flush() == "abc"


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 49151) | st.integers(17, 260), max_size=24))
def test_tokens_that_are_no_valid_text_decode_as_the_whole_does(
    tokenizer: Tokenizer, new_stream: NewStream, token_ids: list[int]
) -> None:
    """Tokens 17 to 260 of this tokenizer are single bytes."""
    streamed = pieces(new_stream(), token_ids)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert whole.startswith("".join(streamed))
    if not whole.endswith(REPLACEMENT):
        assert "".join(streamed) == whole


@pytest.mark.parametrize("text", ["世 hello", " hello hello", "é😀世a。", "aéa"])
def test_bytes_that_decode_in_runs_come_through_too(byte_fallback_tokenizer: Tokenizer, text: str) -> None:
    known = {" ": 256, "a": 258, "世": 259, "。": 260}
    for spelled_out in (False, True):
        token_ids = [
            token_id
            for character in f" {text}"  # the decoder drops the first space
            for token_id in ([known[character]] if character in known and not spelled_out else character.encode())
        ]
        assert "".join(pieces(Detokenizer(byte_fallback_tokenizer), token_ids)) == text


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 255) | st.integers(256, 264), max_size=24))
def test_any_tokens_of_a_byte_level_vocabulary_become_the_text_that_the_tokenizer_makes_of_them_all(
    added_tokens_tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    stream = text_streams(added_tokens_tokenizer)(frozenset())
    assert isinstance(stream, ByteLevelDetokenizer)
    text = "".join(pieces(stream, token_ids)) + stream.flush()
    whole = added_tokens_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert whole in (text, text + REPLACEMENT)  # of a character that is cut off nothing comes


def test_special_tokens_that_are_to_be_seen_come_as_they_are_written(added_tokens_tokenizer: Tokenizer) -> None:
    seen, hidden = added_tokens_tokenizer.encode("<call é><end>").ids
    [first_byte, _] = added_tokens_tokenizer.encode("é").ids
    stream = text_streams(added_tokens_tokenizer)(frozenset([seen]))
    letter = added_tokens_tokenizer.encode("a").ids
    assert pieces(stream, [*letter, seen, hidden, first_byte, seen, *letter]) == [
        *("a", "<call é>", "", "", "<call é>", "a"),
    ]


@settings(deadline=None)
@given(words=st.lists(st.sampled_from([256, 257, 258, 259, 260, 261]), max_size=40))
def test_words_with_spaces_become_the_whole_text_however_many_there_are(
    byte_fallback_tokenizer: Tokenizer, words: list[int]
) -> None:
    streamed = pieces(text_streams(byte_fallback_tokenizer)(frozenset()), words)
    assert "".join(streamed) == byte_fallback_tokenizer.decode(words, skip_special_tokens=True)


def test_an_invalid_byte_after_a_valid_character_spoils_nothing_that_is_out(byte_fallback_tokenizer: Tokenizer) -> None:
    """The whole decodes to three replacements and an a: the run é, 0xFF is invalid as one."""
    assert pieces(Detokenizer(byte_fallback_tokenizer), [*"é".encode(), 0xFF, 258]) == ["", "é", "", f"{REPLACEMENT}a"]


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 261) | st.sampled_from([0xC3, 0xA9, 0xFF, 258]), max_size=24))
def test_no_sequence_of_bytes_raises_or_loses_a_later_word(
    byte_fallback_tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    streamed = pieces(Detokenizer(byte_fallback_tokenizer), [*token_ids, 257, 257])
    assert "".join(streamed).endswith("hello hello")


def test_whole_characters_that_wait_for_a_broken_one_come_with_the_flush(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("so 🦜", add_special_tokens=False).ids
    cut = next(n for n in range(1, len(token_ids)) if tokenizer.decode(token_ids[:n]).endswith(REPLACEMENT))
    stream = Detokenizer(tokenizer)
    pushed = "".join(stream.push(token_id) for token_id in token_ids[:cut])
    assert pushed + stream.flush() == tokenizer.decode(token_ids[:cut]).rstrip(REPLACEMENT)


def test_endless_broken_bytes_are_decoded_in_windows_and_text_after_them_still_comes(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("🦜", add_special_tokens=False).ids[0]
    stream = Detokenizer(tokenizer)
    longest = 0
    decode = stream._decode

    def counted(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    stream._decode = counted  # type: ignore[method-assign]
    assert "".join(stream.push(broken) for _ in range(500)).strip(REPLACEMENT) == ""
    after = tokenizer.encode(" plain text", add_special_tokens=False).ids
    assert "".join(stream.push(token_id) for token_id in after).endswith(" plain text")
    assert longest <= 2 * MOST_PENDING
