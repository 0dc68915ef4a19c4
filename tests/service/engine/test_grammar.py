"""Grammars: what comes out matches what was asked for, whatever the model says; what cannot be used is refused."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from model_patches.loading.load import load_tokenizer
from service.core import SamplingParams, Sequence
from service.engine import grammar, sampler
from service.engine.detokenize import Detokenizer
from service.engine.grammar import MAX_TEXT, GrammarError, GrammarFactory, GrammarSpec, Matcher
from service.errors import RequestError
from service.scaling.policy import Policy
from tests.fakes import GEOMETRY

CHOICE = Policy(GEOMETRY).choose(1, 1)
END = 2
VOCABULARY = 49152
SPECIAL = "<|im_start|>"


@pytest.fixture(scope="module")
def tokenizer(embedded_model_folder: Path) -> Tokenizer:
    backend: Tokenizer = load_tokenizer(embedded_model_folder).backend_tokenizer
    return backend


@pytest.fixture(scope="module")
def factory(tokenizer: Tokenizer) -> GrammarFactory:
    return GrammarFactory(tokenizer, frozenset({END}))


def sequence_for(factory: GrammarFactory, spec: GrammarSpec, **sampling: Any) -> Sequence:
    compiled = factory.begin(spec, param="guided").result()
    params = replace(SamplingParams(max_tokens=400, end_token_ids=frozenset({END}), grammar=compiled), **sampling)
    return Sequence("request", [0], CHOICE, params, deliver=lambda _: None)


def generate(
    factory: GrammarFactory, specs: list[GrammarSpec], tokenizer: Tokenizer, seed: int = 0, **sampling: Any
) -> list[str | None]:
    """Texts of a model whose logits are random; None for one that its grammar has not ended within max_tokens.

    Args:
        factory: compiles.
        specs: one for each text.
        tokenizer: for the text.
        seed: of the logits and the draws.
        sampling: more of the sampling parameters.
    """
    sequences = [sequence_for(factory, spec, seed=seed + row, **sampling) for row, spec in enumerate(specs)]
    live = {sequence: (row, _matcher(sequence)) for row, sequence in enumerate(sequences)}
    texts: list[str | None] = [None] * len(specs)
    random = torch.Generator().manual_seed(seed)
    for _ in range(sequences[0].sampling.max_tokens):
        if not live:
            break
        logits = torch.randn(len(live), VOCABULARY, generator=random)
        rows = list(live)
        grammar.rule_out(logits, {place: (each, live[each][1]) for place, each in enumerate(rows)})
        tokens = sampler.sample(logits, sampler.prepare(rows, VOCABULARY, logits.device))
        for each, token in zip(rows, tokens, strict=True):
            row, matcher = live[each]
            each.output.append(token)
            if matcher.consume(token) or token in each.sampling.end_token_ids:
                texts[row] = _text(tokenizer, each.output)
                del live[each]
    return texts


def _matcher(sequence: Sequence) -> Matcher:
    assert sequence.sampling.grammar is not None
    return sequence.sampling.grammar.new_matcher()


def _text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join(map(stream.push, token_ids)) + stream.flush()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number


def allowed(sequence: Sequence, matcher: Matcher) -> list[int]:
    """Tokens that are not ruled out."""
    logits = torch.zeros(1, VOCABULARY)
    grammar.rule_out(logits, {0: (sequence, matcher)})
    return logits[0].isfinite().nonzero()[:, 0].tolist()


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the kinds that clients send, small enough to be completed by chance."""
    low = random.randint(-50, 50)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 500)},
        {"type": "number", "minimum": low, "exclusiveMaximum": low + 7.5},
        {"type": "integer", "multipleOf": random.randint(2, 9), "minimum": 0, "maximum": 999},
        {"type": "string", "minLength": 2, "maxLength": 9},
        {"type": "string", "pattern": f"^[a-f]{{1,{random.randint(1, 5)}}}-[0-9]+x$"},
        {"type": "string", "format": random.choice(["date", "uuid", "ipv4"])},
        {"enum": [1, "two", None, {"three": [3]}, "ünï"]},
        {"type": ["boolean", "null"]},
        {"const": {"a": [random.randint(0, 9)]}},
    ]
    if depth == 3 or random.random() < 0.4 * min(depth, 1):
        return random.choice(leaves)
    match random.randint(0, 3):
        case 0:
            items = random_schema(random, depth + 1)
            return {"type": "array", "items": items, "minItems": random.randint(0, 2), "maxItems": 3}
        case 1:
            return {"anyOf": [random_schema(random, depth + 1), random.choice(leaves)]}
        case _:
            names = random.sample(["name", "age", "tägs", "x y", 'quo"te', "nested"], random.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(random, depth + 1) for name in names},
                "required": [name for name in names if random.random() < 0.7],
                "additionalProperties": False,
            }


def test_json_of_random_schemas_parses_and_validates_when_its_grammar_ends_it(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    schemas = [random_schema(Random(number)) for number in range(20)]
    texts = generate(factory, [GrammarSpec.json_schema(schema) for schema in schemas], tokenizer)
    ended = [(schema, text) for schema, text in zip(schemas, texts, strict=True) if text is not None]
    for schema, text in ended:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert len(ended) >= 15


RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
            "required": ["kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_gives_what_was_asked_for(factory: GrammarFactory, tokenizer: Tokenizer, seed: int) -> None:
    choices = ["yes", "yes, but", 'a "quoted" \\ one', "新しい\n", ""]
    specs = [
        GrammarSpec.json_schema(RECURSIVE),
        GrammarSpec.regex(r"\(\d{3}\) [a-zé]{2,4}/"),
        GrammarSpec.choice(choices),
        GrammarSpec.grammar('start: "f(" ARG ("," ARG)? ")"\nARG: /[0-9]{1,3}/'),
        GrammarSpec.grammar('root ::= item (" + " item)?\nitem ::= [a-c] | "(" item ")"'),
    ]
    texts = generate(factory, specs, tokenizer, seed)
    parsed, phone, chosen, call, total = (text for text in texts if text is not None)
    jsonschema.validate(json.loads(parsed), RECURSIVE)
    assert re.fullmatch(r"\(\d{3}\) [a-zé]{2,4}/", phone)
    assert chosen in choices
    assert re.fullmatch(r"f\([0-9]{1,3}(,[0-9]{1,3})?\)", call)
    assert re.fullmatch(r"\(*[a-c]\)*( \+ \(*[a-c]\)*)?", total)


def test_a_json_object_is_one(factory: GrammarFactory, tokenizer: Tokenizer) -> None:
    texts = generate(factory, [GrammarSpec.json_object()] * 6, tokenizer)
    ended = [json.loads(text) for text in texts if text is not None]
    assert ended
    assert all(isinstance(value, dict) for value in ended)


# Where texts end


@pytest.mark.parametrize("text", ["", "a", "ab", "abb"])
def test_an_end_token_may_come_exactly_where_the_text_may_end(
    factory: GrammarFactory, tokenizer: Tokenizer, text: str
) -> None:
    sequence = sequence_for(factory, GrammarSpec.regex("ab(b|c)?"))
    matcher = _matcher(sequence)
    letters = [token_id(tokenizer, letter) for letter in text]
    complete = [matcher.consume(letter) for letter in letters]
    assert complete == [False, False, True][: len(text)]
    assert (END in allowed(sequence, matcher)) == (text in ("ab", "abb"))


def test_before_min_tokens_and_under_ignore_eos_an_end_token_comes_only_where_nothing_else_can(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    a, empty = token_id(tokenizer, "a"), GrammarSpec.regex("")
    cases: tuple[dict[str, Any], ...] = ({"min_tokens": 3}, {"end_token_ids": frozenset()})
    for sampling in cases:
        sequence = sequence_for(factory, GrammarSpec.regex("a*"), **sampling)
        matcher = _matcher(sequence)
        for _ in range(2):
            assert END not in allowed(sequence, matcher)
            assert a in allowed(sequence, matcher)
            sequence.output.append(a)
            matcher.consume(a)
        nothing_else = sequence_for(factory, empty, **sampling)
        assert allowed(nothing_else, _matcher(nothing_else)) == [END]
    due = sequence_for(factory, GrammarSpec.regex("a*"), min_tokens=1)
    due.output.append(a)
    assert END in allowed(due, _matcher(due))


def test_tokens_beyond_the_tokenizer_and_special_ones_are_never_text(factory: GrammarFactory) -> None:
    sequence = sequence_for(factory, GrammarSpec.regex(r"(.|\n)*"))
    logits = torch.zeros(1, VOCABULARY + 13)
    grammar.rule_out(logits, {0: (sequence, _matcher(sequence))})
    assert not logits[0, VOCABULARY:].isfinite().any()
    assert logits[0, :3].isfinite().tolist() == [False, False, True]
    assert logits[0].isfinite().sum() > VOCABULARY * 0.95


def test_without_an_end_token_texts_end_where_nothing_can_follow(tokenizer: Tokenizer) -> None:
    factory = GrammarFactory(tokenizer, frozenset())
    specs = [GrammarSpec.json_schema({"enum": ["a", "b"]})]
    assert generate(factory, specs, tokenizer, end_token_ids=frozenset()) in (['"a"'], ['"b"'])


# Matchers and rows


def test_the_matchers_of_one_grammar_do_not_share_their_place(factory: GrammarFactory, tokenizer: Tokenizer) -> None:
    sequence = sequence_for(factory, GrammarSpec.regex("a[bc]"))
    first, second = _matcher(sequence), _matcher(sequence)
    a, b = token_id(tokenizer, "a"), token_id(tokenizer, "b")
    first.consume(a)
    assert b in allowed(sequence, first)
    assert a in allowed(sequence, second)
    assert b not in allowed(sequence, second)


def test_a_row_gets_its_own_mask_and_other_rows_none(factory: GrammarFactory) -> None:
    sequences = [sequence_for(factory, GrammarSpec.choice([letter])) for letter in "ab"]
    logits = torch.randn(4, VOCABULARY)
    before = logits.clone()
    grammar.rule_out(logits, {3: (sequences[0], _matcher(sequences[0])), 1: (sequences[1], _matcher(sequences[1]))})
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, letter in ((3, "a"), (1, "b")):
        [token] = logits[row].isfinite().nonzero()[:, 0].tolist()
        assert token == allowed(sequences["ab".index(letter)], _matcher(sequences["ab".index(letter)]))[0]
        assert logits[row, token] == before[row, token]


def test_a_grammar_that_turns_out_too_complex_is_an_error_at_a_token(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    sequence = sequence_for(factory, GrammarSpec.regex("(.*a.{30}){20}"))
    matcher = _matcher(sequence)
    a = token_id(tokenizer, "a")

    def go_on() -> None:
        for _ in range(500):
            matcher.consume(a if a in allowed(sequence, matcher) else END)

    with pytest.raises(GrammarError, match="too many"):
        go_on()


def test_a_token_that_does_not_fit_is_an_error_without_what_was_generated(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    matcher = _matcher(sequence_for(factory, GrammarSpec.regex("secret")))
    matcher.consume(token_id(tokenizer, "secret"))
    with pytest.raises(GrammarError) as caught:
        matcher.consume(token_id(tokenizer, "b"))
    assert "secret" not in str(caught.value)
    with pytest.raises(GrammarError):
        matcher.consume(END)


# Other tokenizers


def byte_fallback() -> Tokenizer:
    """As SentencePiece's: some pieces, and a token for each byte."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", '"', "世", "{", "}"]
    model = models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    backend = Tokenizer(model)
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_pieces_and_bytes_of_a_sentencepiece_vocabulary_make_the_text() -> None:
    backend = byte_fallback()
    factory = GrammarFactory(backend, frozenset({1}))
    matcher = factory.begin(GrammarSpec.regex('"a 世[é]"'), param="guided").result().new_matcher()
    spelled = ['"', "a", "▁", "<0xE4>", "<0xB8>", "<0x96>", "<0xC3>", "<0xA9>", '"']
    complete = [matcher.consume(token_id(backend, piece)) for piece in spelled]
    assert complete == [False] * 8 + [True]


def test_a_tokenizer_that_cannot_be_read_is_logged_and_grammars_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    factory = GrammarFactory(backend, frozenset({1}))
    with pytest.raises(RequestError, match="not available with this model's tokenizer") as caught:
        factory.begin(GrammarSpec.json_object(), param="response_format").result()
    assert caught.value.param == "response_format"
    assert "grammars are not available" in caplog.text


# What is refused


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec.json_schema({"type": "integer", "not": {"const": 3}}), r'Unimplemented keys: \["not"\]'),
        (GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (GrammarSpec.json_schema({"type": "text"}), "Invalid type: text"),
        (GrammarSpec.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (GrammarSpec.json_schema({"$ref": "https://example.com/schema.json"}), "not present"),
        (GrammarSpec.json_schema({"$ref": "file:///etc/passwd"}), "not present"),
        (GrammarSpec.json_schema({"$ref": "#"}), "NoExtension"),
        (GrammarSpec.json_schema(False), "object"),
        (GrammarSpec.regex("(?=a)b"), "look-around"),
        (GrammarSpec.regex("("), "unclosed group"),
        (GrammarSpec.regex("(" * 10_000 + ")" * 10_000), "invalid regex"),
        (GrammarSpec.choice([]), "nothing to choose from"),
        (GrammarSpec.grammar(""), "No 'root' rule"),
        (GrammarSpec.grammar("start: missing"), "missing"),
        (GrammarSpec.grammar("start: " + "(" * 10_000), "nested"),
        (GrammarSpec.grammar("root ::= " + "(" * 10_000), "recursion"),
        (GrammarSpec.grammar('root ::= "a" | missing'), "missing"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_field_and_the_reason(
    factory: GrammarFactory, spec: GrammarSpec, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        factory.begin(spec, param="response_format.json_schema").result()
    assert caught.value.param == "response_format.json_schema"
    assert caught.value.message.startswith(f"response_format.json_schema: the {spec.kind} cannot be used: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_a_text_beyond_the_limit_is_refused_unread(factory: GrammarFactory) -> None:
    with pytest.raises(RequestError, match=f"has {MAX_TEXT + 1} characters; the limit is {MAX_TEXT}"):
        factory.begin(GrammarSpec.regex("a" * (MAX_TEXT + 1)), param="guided").result()


def chained_rules() -> Iterator[str]:
    yield "start: r0"
    yield from (f"r{number}: r{number + 1}" for number in range(8_000))
    yield 'r8000: "a"'


def test_rules_that_refer_to_rules_as_deeply_as_the_limit_lets_them_do_not_end_the_process(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    """On an ordinary thread's stack a few thousand are a crash."""
    chain = {str(number): {"type": "array", "items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(2_000)}
    schema = {"$ref": "#/$defs/0", "$defs": {**chain, "2000": {"type": "null"}}}
    factory.begin(GrammarSpec.json_schema(schema), param="guided").result()
    assert generate(factory, [GrammarSpec.grammar("\n".join(chained_rules()))], tokenizer) == ["a"]


# Compiling


def test_a_grammar_is_compiled_once_and_the_oldest_give_way(factory: GrammarFactory) -> None:
    first = factory.begin(GrammarSpec.choice(["first"]), param="guided").result()
    assert factory.begin(GrammarSpec.choice(["first"]), param="other").result() is first
    for number in range(grammar.CACHED_GRAMMARS):
        factory.begin(GrammarSpec.choice([f"{number}"]), param="guided").result()
    assert factory.begin(GrammarSpec.choice(["first"]), param="guided").result() is not first


def test_schemas_that_differ_in_the_order_of_their_properties_are_two_grammars(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    def schema(names: str) -> GrammarSpec:
        properties = {name: {"const": 1} for name in names}
        return GrammarSpec.json_schema(
            {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}
        )

    texts = generate(factory, [schema("ab"), schema("ba")], tokenizer)
    assert [list(json.loads(text or "")) for text in texts] == [["a", "b"], ["b", "a"]]


def test_many_threads_may_compile_at_once_and_another_may_use_what_they_made(
    factory: GrammarFactory, tokenizer: Tokenizer
) -> None:
    words = [f"word {number}" for number in range(8)]
    made: dict[str, grammar.Grammar] = {}

    def compile_word(word: str) -> None:
        made[word] = factory.begin(GrammarSpec.choice([word]), param="guided").result()

    threads = [threading.Thread(target=compile_word, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.keys() == set(words)
    assert generate(factory, [GrammarSpec.choice([word]) for word in words], tokenizer) == words


def test_the_stack_of_threads_started_later_is_the_ordinary_one(tokenizer: Tokenizer) -> None:
    GrammarFactory(tokenizer, frozenset({END}))
    assert threading.stack_size() == 0


@pytest.mark.parametrize("text", [SPECIAL, f"a{SPECIAL}b", f"{SPECIAL}{SPECIAL}"])
def test_the_text_of_a_special_token_comes_as_text(factory: GrammarFactory, tokenizer: Tokenizer, text: str) -> None:
    """Not as the token itself, which stands for nothing that is seen."""
    specs = [GrammarSpec.choice([text]), GrammarSpec.json_schema({"const": text})]
    assert generate(factory, specs, tokenizer) == [text, json.dumps(text)]


def test_special_tokens_keep_their_ids_in_grammars(factory: GrammarFactory) -> None:
    matcher = factory.begin(GrammarSpec.grammar('start: "a" <[1]> "b"'), param="guided").result().new_matcher()
    for token in (81, 1, 82):
        allowed = int.from_bytes(matcher.allowed(), "little")
        assert allowed == 1 << token
        matcher.consume(token)
