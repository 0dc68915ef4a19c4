"""A tokenizer from the metadata of a GGUF file.

Both kinds are built here: transformers' own reader ignores most of `tokenizer.ggml.pre`, loses special tokens with
letters outside the byte alphabet, and leaves out SentencePiece's blank before a text that begins with one.
Knows GGUF's tokenizer keys. Does not know weights or configs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.tokenizer_rules import SplitRule, split_rule

_BLANK = "\u2581"  # SentencePiece's sign for one
_CONTROL = 3
_USER_DEFINED = 4
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# By these texts llama.cpp knows control tokens that end a turn: few files name them by a key (Gemma's, Phi-3's do not).
_TURN_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>"),
    }
)
_HARMONY = frozenset({"<|return|>", "<|call|>"})  # where these end turns, <|end|> ends a message only (gpt-oss)
_SPECIAL_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_from_gguf(file: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes, with its chat template.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a rule for cutting text, that is not known.
        DamagedModelError: a vocabulary whose merges do not fit it, or without scores.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        if "tokenizer.ggml.scores" not in metadata:
            raise DamagedModelError(f"{file} does not say tokenizer.ggml.scores")
        backend = _sentencepiece(metadata)
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", True)
    elif kind == "gpt2":
        rule = split_rule(metadata.get("tokenizer.ggml.pre"))
        backend = _byte_level(file, metadata, rule)
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos)
    else:
        raise UnsupportedModelError(
            f"{file} has a tokenizer of the kind {kind!r} (tokenizer.ggml.model); supported: gpt2, llama. "
            "Use the model's Hugging Face folder instead"
        )
    _add_ends(backend, metadata, add_bos=add_bos)
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {role: tokens[metadata[key]] for role, key in _SPECIAL_ROLES.items() if key in metadata}
    make_tokenizer: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    tokenizer = make_tokenizer(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
    tokenizer.chat_template = _chat_template(metadata)
    return tokenizer


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: those that the file has keys for, then the control tokens that end turns."""
    named = [number for key in _END_KEYS if (number := metadata.get(f"tokenizer.ggml.{key}")) is not None]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    tokens = metadata["tokenizer.ggml.tokens"]
    control = {token: number for number, token in enumerate(tokens[: len(kinds)]) if kinds[number] == _CONTROL}
    ends = _TURN_ENDS - {"<|end|>"} if control.keys() >= _HARMONY else _TURN_ENDS
    return list(dict.fromkeys([*named, *(number for token, number in control.items() if token in ends)]))


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The one template, or all by their names, such as the one for tools, as transformers has them."""
    default: str | None = metadata.get("tokenizer.chat_template")
    names: list[str] = metadata.get("tokenizer.chat_templates", [])
    named = {name: text for name in names if (text := metadata.get(f"tokenizer.chat_template.{name}")) is not None}
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE: of two neighbours, those are joined first whose whole has the best score."""
    tokens = [_respelled(token) for token in metadata["tokenizer.ggml.tokens"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    if metadata["general.architecture"].startswith("gemma"):  # whose scores are not in the order of its merges
        scores = range(0, -len(tokens), -1)
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = None if unknown_id is None else tokens[unknown_id]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blanks: list[normalizers.Normalizer] = [normalizers.Replace(" ", _BLANK)]
    text: list[decoders.Decoder] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend(_BLANK))
        text.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(blanks)
    backend.decoder = decoders.Sequence(text)
    backend.add_tokens([token for token in _added_tokens(tokens, metadata) if token.content.strip(_BLANK)])
    return backend


def _respelled(token: str) -> str:
    """Gemma's files have runs of blanks as they are in a text, not as the pieces that they are in the vocabulary."""
    return token if token.strip(" ") else _BLANK * len(token)


def _byte_level(file: Path, metadata: Mapping[str, Any], rule: SplitRule) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    try:
        model = BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])],
            ignore_merges=rule.ignore_merges,
        )
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise DamagedModelError(f"{file}: the tokenizer's merges do not fit its vocabulary ({error})") from error
    backend = Tokenizer(model)
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(tokens, metadata))
    return backend


def _pair(merge: str) -> tuple[str, str]:
    # The first character belongs to the left part even where it is a blank.
    blank = merge.index(" ", 1)
    return merge[:blank], merge[blank + 1 :]


def _added_tokens(tokens: list[str], metadata: Mapping[str, Any]) -> list[AddedToken]:
    """Tokens found whole in the text before it is cut: control tokens, which are special, and the maker's own."""
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _add_ends(backend: Tokenizer, metadata: Mapping[str, Any], *, add_bos: bool) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    before = [bos] if add_bos and bos is not None else []
    after = [eos] if metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None else []
    one = [*(tokens[number] for number in before), "$A", *(tokens[number] for number in after)]
    two = [*one, *(tokens[number] for number in before), "$B", *(tokens[number] for number in after)]
    special = {(tokens[number], number) for number in (*before, *after)}
    backend.post_processor = processors.TemplateProcessing(single=one, pair=two, special_tokens=sorted(special))
