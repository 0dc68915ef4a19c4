"""Text that must match a grammar: JSON schemas, regular expressions, choices, Lark and EBNF, through llguidance.

A grammar is compiled once, away from the engine's thread and the event loop. Each sequence has a matcher of its own,
which knows where in the grammar it is. Before each token the matchers rule out what may not follow; end tokens may
come exactly where the grammar may end.
"""

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from service import core
from service.errors import RequestError

MAX_TEXT = 128 * 1024  # characters of a grammar
STACK_BYTES = 256 << 20  # of the thread that compiles, only what is used is taken: rules can refer to rules very deeply
MAX_REASON = 500  # characters of why a grammar was refused
CACHED_GRAMMARS = 64
NO_TEXT = "\ufdd0"  # a code point that Unicode keeps out of texts
# Some models write blanks for ever where they are allowed to.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"

Kind = Literal["json_schema", "regex", "choice", "grammar"]

logger = logging.getLogger(__name__)


class GrammarError(Exception):
    """A sequence cannot go on: a token that does not fit, or a grammar that turned out too complex."""


@dataclass(frozen=True)
class GrammarSpec:
    """What a client asks for.

    Attributes:
        kind: how the text is read.
        text: a schema or a list of strings as JSON, a regular expression, or a grammar in Lark's or EBNF notation.
    """

    kind: Kind
    text: str

    @classmethod
    def json_object(cls) -> "GrammarSpec":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> "GrammarSpec":
        """JSON that a schema accepts; properties come in the schema's order."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> "GrammarSpec":
        """All of the text matches a regular expression in Rust's syntax: without look-around and back-references."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> "GrammarSpec":
        """One of some strings."""
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def grammar(cls, text: str) -> "GrammarSpec":
        """A grammar, in Lark's notation as llguidance extends it, or in EBNF as llama.cpp writes it (GBNF)."""
        return cls("grammar", text)


class Matcher:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self.end_token_ids = end_token_ids
        self._matcher = matcher

    def allowed(self) -> bytes:
        """One bit for each token, lowest first: whether it may come next. End tokens may come where the text may end;
        nothing but they may once an error has occurred, of which `consume` tells."""
        return self._matcher.compute_bitmask()

    def consume(self, token: int) -> bool:
        """Take the sequence's next token.

        Returns:
            Whether nothing can follow.

        Raises:
            GrammarError: the token does not fit, or the grammar is too complex to go on.
        """
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            raise GrammarError(_reason(self._matcher.get_error()))
        return self._matcher.is_stopped()


class Grammar:
    """A compiled grammar, for any number of sequences."""

    def __init__(self, prototype: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._prototype = prototype
        self._end_token_ids = end_token_ids

    def new_matcher(self) -> Matcher:
        """A matcher at the grammar's beginning."""
        return Matcher(self._prototype.deep_copy(), self._end_token_ids)


class GrammarFactory:
    """Compiles grammars for one tokenizer and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: frozenset[int]) -> None:
        """Read the tokenizer, which takes about half a second. One that llguidance cannot read is logged, and every
        grammar is refused.

        Args:
            tokenizer: the model's.
            end_token_ids: tokens that end a text.
        """
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        # Without an end token, texts end where nothing can follow; but llguidance must be given one.
        ends = [token for token in end_token_ids if token < size] or [size - 1]
        self._end_token_ids = frozenset(ends)
        self._unreadable = ""
        try:
            self._tokenizer = LLTokenizer(_with_special_tokens_hidden(tokenizer), eos_token=ends)
        except ValueError as error:
            self._unreadable = _reason(str(error))
            logger.warning("grammars are not available: the tokenizer cannot be read: %s", self._unreadable)
        self._compile = lru_cache(CACHED_GRAMMARS)(self._compile_anew)
        self._compiler = _thread_with_stack(STACK_BYTES)

    def begin(self, spec: GrammarSpec, *, param: str) -> Future[Grammar]:
        """Compile a grammar, or find it among the latest, in a thread of its own.

        Args:
            spec: what to compile.
            param: the request's field that asks for it, for errors.

        Raises:
            RequestError: it cannot be used; the message says why. In part the future raises it.
        """
        if self._unreadable:
            raise RequestError(f"{param}: not available with this model's tokenizer: {self._unreadable}", param=param)
        if len(spec.text) > MAX_TEXT:
            message = f"{param}: the {spec.kind} has {len(spec.text)} characters; the limit is {MAX_TEXT}"
            raise RequestError(message, param=param)
        return self._compiler.submit(self._compile_for, spec, param)

    def _compile_for(self, spec: GrammarSpec, param: str) -> Grammar:
        try:
            return self._compile(spec)
        except ValueError as error:
            raise RequestError(f"{param}: the {spec.kind} cannot be used: {error}", param=param) from error

    def _compile_anew(self, spec: GrammarSpec) -> Grammar:
        try:
            text = _to_llguidance(spec)
        except ValueError as error:
            raise ValueError(_reason(str(error))) from error
        limits = LLParserLimits(verbose_errors=False)  # verbose ones repeat what was generated
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what cannot even begin is refused, and all copies have this ready
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        return Grammar(matcher, self._end_token_ids)


@torch.inference_mode()
def rule_out(logits: torch.Tensor, constrained: Mapping[int, tuple[core.Sequence, Matcher]]) -> None:
    """Set to minus infinity, in place, what may not come next.

    Before min_tokens, and under ignore_eos, an end token may come only where nothing else can.

    Args:
        logits: float32 [R, vocabulary].
        constrained: rows that have a grammar.
    """
    if not constrained:
        return
    bits = np.frombuffer(b"".join(matcher.allowed() for _, matcher in constrained.values()), dtype=np.uint8)
    by_row = bits.reshape(len(constrained), -1)  # logits beyond the tokenizer are ruled out
    allowed = np.unpackbits(by_row, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
    for row, (sequence, matcher) in zip(allowed, constrained.values(), strict=True):
        early = matcher.end_token_ids | sequence.sampling.end_token_ids
        if len(sequence.output) >= sequence.sampling.min_tokens:
            early -= sequence.sampling.end_token_ids
        ends = [token for token in early if row[token]]
        if ends and np.count_nonzero(row) > len(ends):
            row[ends] = False
    rows = torch.tensor(list(constrained), device=logits.device)
    logits[rows] = torch.where(torch.from_numpy(allowed).to(logits.device), logits[rows], -torch.inf)


def _with_special_tokens_hidden(tokenizer: Tokenizer) -> str:
    """The tokenizer as JSON, its special tokens under names that no text has.

    Where a grammar leaves one text only, llguidance asks the tokenizer how that is written: with a special token, if it
    contains the name of one, which then does not count as that text. Grammars name special tokens by their ids.
    """
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"].get("vocab")
    for token in content["added_tokens"]:
        if token["special"]:
            hidden = f"{NO_TEXT}{token['content']}"
            if isinstance(vocabulary, dict) and token["content"] in vocabulary:
                vocabulary[hidden] = vocabulary.pop(token["content"])
            elif isinstance(vocabulary, list) and token["id"] < len(vocabulary):  # unigram: pairs of token and score
                vocabulary[token["id"]][0] = hidden
            token["content"] = hidden
    return json.dumps(content)


def _to_llguidance(spec: GrammarSpec) -> str:
    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(spec.text, defaults={"whitespace_pattern": WHITESPACE})
    if spec == GrammarSpec.choice([]):
        raise ValueError("there is nothing to choose from")
    return grammar_from(spec.kind, spec.text)


def _reason(error: str) -> str:
    """llguidance's words in one line."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:MAX_REASON]


def _thread_with_stack(size: int) -> ThreadPoolExecutor:
    """One thread with a stack of so many bytes, started at once: the size is a setting of the whole process."""
    before = threading.stack_size(size)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
