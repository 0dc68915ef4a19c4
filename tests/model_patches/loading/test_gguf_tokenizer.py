"""What a GGUF file says about its tokenizer is honoured, key by key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import PreTrainedTokenizerBase

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.gguf_tokenizer import end_tokens, tokenizer_from_gguf
from model_patches.loading.load import load_tokenizer

TinyGguf = Callable[..., Path]
TokenizerOf = Callable[..., PreTrainedTokenizerBase]
BOS, EOS = 1, 2


@pytest.fixture
def tokenizer_of(tiny_gguf: TinyGguf, tmp_path: Path) -> TokenizerOf:
    """The tokenizer of a tiny file with the given metadata, after the way through a folder that it takes in use."""

    def make(**metadata: Any) -> PreTrainedTokenizerBase:
        path = tiny_gguf(metadata={f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
        tokenizer_from_gguf(path, GgufFile([path]).metadata).save_pretrained(tmp_path / "folder")
        return load_tokenizer(tmp_path / "folder")

    return make


def test_the_named_rule_cuts_the_text(tokenizer_of: TokenizerOf) -> None:
    assert tokenizer_of(pre="smollm").tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer_of(pre="gpt-2").tokenize("  12") == ["Ġ", "Ġ", "1", "2"]


def test_ids_are_the_files_own_and_none_is_added(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of()
    assert len(tokenizer) == 4 + 1 + 256 + 4
    assert tokenizer.convert_ids_to_tokens([0, 3, 4]) == ["<|endoftext|>", "<\uff5cUser\uff5c>", "<think>"]


def test_every_control_token_is_special(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of()
    assert tokenizer.encode("<|im_start|>a<\uff5cUser\uff5c>") == [1, *tokenizer.encode("a"), 3]
    assert tokenizer.decode([0, 1, 2, 3, *tokenizer.encode("a")], skip_special_tokens=True) == "a"


def test_the_makers_own_tokens_are_whole_but_not_special(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of()
    assert tokenizer.encode("a<think>") == [*tokenizer.encode("a"), 4]
    assert tokenizer.decode([4], skip_special_tokens=True) == "<think>"


def test_special_roles_are_taken_over(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(unknown_token_id=0, padding_token_id=2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 2)


@pytest.mark.parametrize(
    ("metadata", "before", "after"),
    [
        ({"pre": "smollm"}, [], []),
        ({"pre": "smollm", "add_bos_token": True}, [BOS], []),
        ({"pre": "smollm", "add_bos_token": True, "add_eos_token": True}, [BOS], [EOS]),
        ({"pre": "smollm", "add_bos_token": True, "bos_token_id": None}, [], []),
        ({"pre": "llama-bpe"}, [BOS], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
)
def test_ends_are_added_as_the_file_says(
    tokenizer_of: TokenizerOf, metadata: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = tokenizer_of(**metadata)
    bare = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [*before, *bare, *after]


def test_a_whole_token_is_taken_where_the_rule_ignores_merges(tokenizer_of: TokenizerOf) -> None:
    no_way_there = {"merges": ["t h"]}
    assert tokenizer_of(pre="llama-bpe", **no_way_there).tokenize("the") == ["the"]
    assert tokenizer_of(pre="smollm", **no_way_there).tokenize("the") == ["th", "e"]


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv"])
def test_another_kind_of_tokenizer_is_refused_by_name(tokenizer_of: TokenizerOf, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'.*gpt2, llama"):
        tokenizer_of(model=kind)


def test_merges_that_do_not_fit_are_called_damaged(tokenizer_of: TokenizerOf) -> None:
    with pytest.raises(DamagedModelError, match="merges do not fit"):
        tokenizer_of(merges=["z z"])


LETTERS = ["\u2581", "t", "h", "e", "th", "the", "\u2581the"]


def _sentencepiece(*, letters: list[str] = LETTERS, own: int = 0) -> dict[str, Any]:
    """Metadata of a vocabulary with a token for each byte; `own` so many letters are the maker's own tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    plain = len(letters) - own
    return {
        **{"model": "llama", "pre": None, "merges": None, "unknown_token_id": 0},
        "tokens": ["<unk>", "<s>", "</s>", *bytes_, *letters],
        "token_type": [*kinds, *[gguf.TokenType.NORMAL] * plain, *[gguf.TokenType.USER_DEFINED] * own],
        "scores": [0.0] * 259 + [-1000.0 if len(letter) == 1 else float(-len(letter)) for letter in letters],
    }


def test_a_sentencepiece_vocabulary_needs_no_rule(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of(**_sentencepiece())
    assert tokenizer.tokenize("the") == ["\u2581the"]
    assert tokenizer.encode("the") == [BOS, *tokenizer.encode("the", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("the \u00e9", add_special_tokens=False)) == "the \u00e9"


def test_sentencepiece_joins_what_scores_best_first(tokenizer_of: TokenizerOf) -> None:
    vocabulary = _sentencepiece(letters=["\u2581", "t", "h", "e", "th", "he"])
    assert tokenizer_of(**vocabulary | {"scores": [0.0] * 263 + [-1.0, -2.0]}).tokenize("the") == ["\u2581", "th", "e"]
    assert tokenizer_of(**vocabulary | {"scores": [0.0] * 263 + [-2.0, -1.0]}).tokenize("the") == ["\u2581", "t", "he"]


@pytest.mark.parametrize(
    ("prefix", "text", "tokens"),
    [
        (None, "the", ["\u2581the"]),
        (None, " the", ["\u2581", "\u2581the"]),
        (True, "the", ["\u2581the"]),
        (False, "the", ["the"]),
        (False, " the", ["\u2581the"]),
    ],
)
def test_a_blank_is_put_before_a_text_unless_the_file_says_otherwise(
    tokenizer_of: TokenizerOf, prefix: bool | None, text: str, tokens: list[str]
) -> None:
    tokenizer = tokenizer_of(**_sentencepiece(), add_space_prefix=prefix)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_gemmas_runs_of_blanks_are_one_token(tiny_gguf: TinyGguf) -> None:
    vocabulary = _sentencepiece(letters=[*LETTERS, "<mask>", "  ", "   "], own=3) | {"add_space_prefix": False}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    tokenizer = tokenizer_from_gguf(
        path := tiny_gguf(architecture="gemma2", metadata=metadata), GgufFile([path]).metadata
    )
    assert tokenizer.tokenize("the   the<mask>") == ["the", "\u2581\u2581", "\u2581the", "<mask>"]
    assert tokenizer.encode("   ", add_special_tokens=False) == [268]


def test_a_sentencepiece_vocabulary_without_scores_is_called_damaged(tokenizer_of: TokenizerOf) -> None:
    with pytest.raises(DamagedModelError, match=r"does not say tokenizer\.ggml\.scores"):
        tokenizer_of(**_sentencepiece() | {"scores": None})


@pytest.mark.parametrize(
    ("control", "plain", "ends"),
    [
        (["<s>", "<end_of_turn>"], ["a"], [0, 1]),
        (["<s>", "a"], ["<|end|>"], [0]),
        (["<s>", "<|end|>", "<|im_end|>"], [], [0, 1, 2]),
        (["<s>", "<|end|>", "<|return|>", "<|call|>"], [], [0, 2, 3]),
    ],
    ids=["gemma", "no control token", "phi3", "gpt-oss"],
)
def test_control_tokens_that_end_turns_end_answers(control: list[str], plain: list[str], ends: list[int]) -> None:
    kinds = [gguf.TokenType.CONTROL] * len(control) + [gguf.TokenType.NORMAL] * len(plain)
    keys = {"tokens": [*control, *plain], "token_type": kinds, "eos_token_id": 0}
    assert end_tokens({f"tokenizer.ggml.{key}": value for key, value in keys.items()}) == ends
