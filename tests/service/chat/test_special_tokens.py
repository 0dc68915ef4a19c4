"""Markers that decoding would swallow are told with their ids."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from service.chat.formats import FORMATS
from service.chat.reasoning import REASONING
from service.chat.special_tokens import special_markers


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[THINK]", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("[/THINK]", special=False)])
    return tokenizer


def test_only_markers_that_are_special_are_told(tokenizer: Tokenizer) -> None:
    assert special_markers(tokenizer, FORMATS["mistral-named"], REASONING[1]) == {
        "[TOOL_CALLS]": 1,
        "[ARGS]": 2,
        "[THINK]": 3,
    }
    assert special_markers(tokenizer, FORMATS["hermes"], None) == {}
    assert special_markers(tokenizer, None, REASONING[0]) == {}
    assert special_markers(tokenizer, None, None) == {}


def test_what_is_told_is_what_decoding_swallows(tokenizer: Tokenizer) -> None:
    for markers in [*(each.markers for each in FORMATS.values()), *((r.opening, r.closing) for r in REASONING)]:
        for marker in markers:
            number = tokenizer.token_to_id(marker)
            if number is None:
                continue
            swallowed = tokenizer.decode([number], skip_special_tokens=True) == ""
            told = {key for each in FORMATS.values() for key in special_markers(tokenizer, each, None)} | {
                key for each in REASONING for key in special_markers(tokenizer, None, each)
            }
            assert (marker in told) is swallowed
