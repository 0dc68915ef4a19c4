"""Text is cut and merged as the published rules say, checked against an implementation that shares no code with it."""

# ruff: noqa: RUF001 - letters that look alike are what a tokenizer must tell apart

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from transformers import PreTrainedTokenizerFast

from model_patches.errors import UnsupportedModelError
from model_patches.loading.load import load_tokenizer
from model_patches.loading.tokenizer_rules import SPLIT_RULES, split_rule

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

PUBLISHED: dict[str, list[str]] = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "tekken": [TEKKEN],
    "gpt-4o": [GPT4O],
    "bloom": [BLOOM],
    "glm4": [LLAMA3],
}

WRITTEN_BY_HAND = [
    "x  12",
    "",
    " ",
    "   ",
    "\n\n\t \r\n",
    "1234567890",
    "3.14159, 1,000,000 and 2²",
    "Ⅷ chapters, ½ cup, ٣٤٥, १२३",
    "I'm sure they'll say it's HE'LL or we've",
    "def f(x):\n    return {\n\t'a': x ** 2,  # twice\n    }\n",
    'for (int i=0;i<10;++i) { printf("%d\\n", i); }',
    "你好，世界。今天是2024年5月1日",
    "こんにちは世界、１２３",
    "안녕하세요 세계 42",
    "مرحبا بالعالم ١٢٣",
    "שָׁלוֹם עולם",
    "नमस्ते दुनिया",
    "e\u0301a\u0308o\u0302 combining",
    "👩‍👩‍👧‍👦 family 👍🏽 and 🇫🇷",
    "a\u00a0b\u2003c\u3000d\u200be",
    "\u0085next\u2028line\x0bfeed\x0c",
    "\x00\x01\x1c\x1f\x7f control",
    "𝒳 ∈ ℝⁿ, ∑ᵢ xᵢ² ≤ 1",
    "trailing blanks   ",
    "   leading blanks 7",
    "https://example.org/a?b=1&c=%20#d",
    "camelCaseHTTPServer_snake_case-kebab",
    "\ufeffmark",
    "<not a tag> <| nor a token |>",
]

PIECES = [
    *"abcXYZ0123456789",
    *" \t\n\r\u00a0\u3000",
    *".,;:!?'\"()[]{}<>/\\|@#$%^&*-+=_~`",
    *"éüßñçøÅΩжщЯčž",
    *"的一是不了人我在有他日本語カタナ한국어",
    *"ابتثجحخ٠١٢אבגदनमฟฟี",
    *"\u0301\u0308\u0327\u064b\u20e3\ufe0f\u200d",
    *"😀👍🏽🇩🇪🚀½²Ⅳ①",
    "  ",
    "    ",
    "\n\n",
    "'s",
    "'LL",
    " the",
    " 2024",
    "def ",
    "return",
]


def texts() -> list[str]:
    chooser = random.Random(2024)
    made = ["".join(chooser.choices(PIECES, k=chooser.randint(1, 40))) for _ in range(200 - len(WRITTEN_BY_HAND))]
    return [*WRITTEN_BY_HAND, *made]


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def in_byte_letters(text: str) -> str:
    return "".join(byte_letters()[byte] for byte in text.encode())


def cut(text: str, expressions: list[str]) -> list[str]:
    """Each expression in turn cuts every piece into its matches and what lies between them."""
    pieces = [text]
    for expression in expressions:
        pieces = [part for piece in pieces for part in regex.split(f"({expression})", piece) if part]
    return pieces


class PlainBpe:
    """Byte-pair encoding as first described: merge the best-ranked neighbours, leftmost first, until none is left."""

    def __init__(self, tokenizer_json: Path) -> None:
        model = json.loads(tokenizer_json.read_text())["model"]
        self._ids: dict[str, int] = model["vocab"]
        self._ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}

    def encode(self, text: str, expressions: list[str]) -> list[int]:
        return [self._ids[part] for piece in cut(text, expressions) for part in self._merge(in_byte_letters(piece))]

    def _merge(self, piece: str) -> list[str]:
        parts = list(piece)
        while True:
            pairs = [pair for pair in pairwise(parts) if pair in self._ranks]
            if not pairs:
                return parts
            best = min(pairs, key=lambda pair: self._ranks[pair])
            at = next(i for i in range(len(parts) - 1) if (parts[i], parts[i + 1]) == best)
            parts[at : at + 2] = ["".join(best)]


@pytest.fixture(scope="module")
def embedded_tokenizer(embedded_model_folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(embedded_model_folder)


def test_blanks_before_digits_stay_together(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    assert embedded_tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]


def test_the_embedded_tokenizer_agrees_with_the_published_rule(
    embedded_tokenizer: PreTrainedTokenizerFast, embedded_model_folder: Path
) -> None:
    reference = PlainBpe(embedded_model_folder / "tokenizer.json")
    assert len(texts()) == 200
    for text in texts():
        assert embedded_tokenizer.encode(text) == reference.encode(text, PUBLISHED["smollm"]), repr(text)


def test_decoding_gives_the_text_back(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    for text in texts():
        assert embedded_tokenizer.decode(embedded_tokenizer.encode(text)) == text


def test_control_tokens_are_special_and_no_start_token_is_added(embedded_tokenizer: PreTrainedTokenizerFast) -> None:
    assert embedded_tokenizer.encode("a<|im_end|>") == [*embedded_tokenizer.encode("a"), 2]
    assert embedded_tokenizer.decode([2, 1, 0, 16, *embedded_tokenizer.encode("a")], skip_special_tokens=True) == "a"
    assert embedded_tokenizer.encode("") == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_rule_cuts_as_published(name: str) -> None:
    pre_tokenizer = split_rule(name).pre_tokenizer()
    for text in texts():
        ours = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        assert ours == [in_byte_letters(piece) for piece in cut(text, PUBLISHED[name])], repr(text)


def test_falcon_takes_punctuation_out_and_digits_in_threes() -> None:
    cut_up = split_rule("falcon").pre_tokenizer().pre_tokenize_str("it's 12345 x==y ($7) 12\n")
    assert "|".join(piece for piece, _ in cut_up) == "it|'|s|Ġ|123|45|Ġx|==|y|Ġ|($|7|)|Ġ|12|Ċ"


@pytest.mark.parametrize(
    ("names", "like"),
    [
        (("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
        (("mpt", "olmo", "phi-2", "exaone4"), "gpt-2"),
        (("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe"),
        (("deepseek-r1-qwen", "megrez", "stablelm2"), "qwen2"),
        (("llama4", "kanana2"), "gpt-4o"),
        (("poro-chat", "gpt3-finnish"), "bloom"),
        (("chatglm-bpe", "dbrx"), "glm4"),
    ],
)
def test_names_that_llama_cpp_treats_alike_are_alike(names: tuple[str, ...], like: str) -> None:
    assert {split_rule(name) for name in names} == {split_rule(like)}


def test_llama3_takes_whole_tokens_and_starts_with_bos_unless_told_otherwise() -> None:
    marked = {name for name, rule in SPLIT_RULES.items() if rule.ignore_merges and rule.add_bos}
    assert {"llama-bpe", "llama3", "llama-v3", "tekken"} <= marked
    assert not {"smollm", "gpt-2", "qwen2", "dbrx", "smaug-bpe"} & marked


def test_an_unknown_rule_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mystery'.*gpt-2, .*llama-bpe, .*smollm"):
        split_rule("mystery")


@pytest.mark.parametrize("name", [None, "default"])
def test_a_file_that_names_no_rule_is_refused(name: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre"):
        split_rule(name)
