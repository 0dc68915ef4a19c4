"""How text is cut before byte-level BPE merges it: the rules behind the names in a GGUF's `tokenizer.ggml.pre`.

The names and what they share are llama.cpp's; the expressions are those of the models' own tokenizer.json files.
Knows the tokenizers library. Does not know GGUF files or vocabularies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from model_patches.errors import UnsupportedModelError


@dataclass(frozen=True)
class SplitRule:
    """One way of cutting text.

    Attributes:
        pre_tokenizer: builds the tokenizers-library object that cuts and then maps bytes to characters.
        ignore_merges: a piece that is a token as a whole is taken as it is, even where merges lead elsewhere.
        add_bos: whether the beginning-of-sequence token is added when the file does not say.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False


def split_rule(name: str | None) -> SplitRule:
    """The rule that a GGUF names.

    Raises:
        UnsupportedModelError: no name, or one that is not known. A wrong rule would not fail but quietly answer worse.
    """
    if name is None or name == "default":
        raise UnsupportedModelError(
            "the GGUF file does not say how its tokenizer cuts text (tokenizer.ggml.pre); "
            "convert the model again with a current llama.cpp, or use its Hugging Face folder"
        )
    if name not in SPLIT_RULES:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer cuts text by the rule {name!r}, which is not known here; "
            f"known: {', '.join(sorted(SPLIT_RULES))}. Use the model's Hugging Face folder instead"
        )
    return SPLIT_RULES[name]


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    # Digits go first: "x  12" leaves "x  ", whose blanks then stay together as they do at the end of a text.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


def _expression(expression: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        cut = pre_tokenizers.Split(Regex(expression), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

_GPT2 = SplitRule(_gpt2)
_SMOLLM = SplitRule(_digits_then_gpt2)
_LLAMA3_SPLIT = _expression(rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}")
_LLAMA3 = SplitRule(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_LLAMA3_MERGING = SplitRule(_LLAMA3_SPLIT)
_QWEN2 = SplitRule(_expression(rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"))
_TEKKEN = SplitRule(
    _expression(rf"{_LOWER_CASED}|{_UPPER_CASED}|\p{{N}}|{_REST_WITH_SLASH}"), ignore_merges=True, add_bos=True
)
_GPT4O = SplitRule(
    _expression(
        rf"{_LOWER_CASED}{_CONTRACTION}?|{_UPPER_CASED}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
    )
)
_BLOOM = SplitRule(_expression(r" ?[^(\s|.,!?…。，、।۔،)]+"))  # noqa: RUF001 - full stops and commas of many scripts

SPLIT_RULES: Mapping[str, SplitRule] = {
    "gpt-2": _GPT2,
    "a.x-4.0": _GPT2,
    "exaone4": _GPT2,
    "gigachat": _GPT2,
    "granite-docling": _GPT2,
    "jais": _GPT2,
    "mellum": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "trillion": _GPT2,
    "smollm": _SMOLLM,
    "codeshell": _SMOLLM,
    "command-r": _SMOLLM,
    "exaone": _SMOLLM,
    "mellum2": _SMOLLM,
    "minerva-7b": _SMOLLM,
    "refact": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3_MERGING,
    "smaug-bpe": _LLAMA3_MERGING,
    "chatglm-bpe": _LLAMA3_MERGING,
    "glm4": _LLAMA3_MERGING,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "kormo": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "tekken": _TEKKEN,
    "bloom": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "poro-chat": _BLOOM,
    "falcon": SplitRule(_falcon),
    "gpt-4o": _GPT4O,
    "kanana2": _GPT4O,
    "llama4": _GPT4O,
}
