"""What a GGUF file says about its tokenizer is honoured, key by key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import PreTrainedTokenizerBase

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.gguf_file import GgufFile
from model_patches.loading.gguf_tokenizer import tokenizer_from_gguf
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


def test_a_sentencepiece_vocabulary_needs_no_rule(tokenizer_of: TokenizerOf) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", "t", "h", "e", "th", "the", "▁the"]
    tokenizer = tokenizer_of(
        model="llama",
        pre=None,
        merges=None,
        tokens=["<unk>", "<s>", "</s>", *bytes_, *letters],
        token_type=[
            gguf.TokenType.UNKNOWN,
            gguf.TokenType.CONTROL,
            gguf.TokenType.CONTROL,
            *[gguf.TokenType.BYTE] * 256,
            *[gguf.TokenType.NORMAL] * len(letters),
        ],
        scores=[0.0] * 259 + [-1000.0, -1000.0, -1000.0, -1000.0, -1.0, -2.0, -3.0],
        unknown_token_id=0,
    )
    assert tokenizer.tokenize("the") == ["▁the"]
    assert tokenizer.encode("the") == [BOS, *tokenizer.encode("the", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("the é", add_special_tokens=False)) == "the é"
