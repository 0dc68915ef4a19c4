"""A tokenizer from the metadata of a GGUF file.

Byte-level BPE is built here, because transformers' own reader ignores most of `tokenizer.ggml.pre` and loses special
tokens with letters outside the byte alphabet; SentencePiece vocabularies, which have no such rule, are left to it.
Knows GGUF's tokenizer keys. Does not know weights or configs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.tokenizer_rules import split_rule

_CONTROL = 3
_USER_DEFINED = 4
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
        DamagedModelError: a byte-level vocabulary and merges that do not fit each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokenizer: PreTrainedTokenizerBase
    if kind == "llama":
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    elif kind == "gpt2":
        tokenizer = _byte_level_tokenizer(file, metadata)
    else:
        raise UnsupportedModelError(
            f"{file} has a tokenizer of the kind {kind!r} (tokenizer.ggml.model); supported: gpt2, llama. "
            "Use the model's Hugging Face folder instead"
        )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level_tokenizer(file: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    rule = split_rule(metadata.get("tokenizer.ggml.pre"))
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
    roles = {role: tokens[metadata[key]] for role, key in _SPECIAL_ROLES.items() if key in metadata}
    _add_ends(backend, metadata, add_bos=metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos))
    make_tokenizer: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    return make_tokenizer(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)


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
