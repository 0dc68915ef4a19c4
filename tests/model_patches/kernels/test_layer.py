"""The fused decoder against its definition in float64, computed over whole sequences without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad, silu

from model_patches.kernels import ops
from model_patches.kernels.ops import Level
from tests.model_patches.kernels.test_linear import pack

pytestmark = pytest.mark.usefixtures("operators")

PAGE_SIZE, PAGES = 4, 40
EPSILON, VOCABULARY, LAYERS = 1e-3, 37, 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, and what its layers have beyond the plain ones."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    pairs: int
    mlp: int
    window: int
    biases: bool
    head_norms: bool
    interleaved: bool
    dtype: torch.dtype


class Decoder:
    """Random weights, the operator over them, and the definition."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        joined = (shape.heads + 2 * shape.kv_heads) * shape.dim
        sizes = {"qkv": (joined, shape.hidden), "output": (shape.hidden, shape.heads * shape.dim)}
        sizes |= {"gate": (shape.mlp, shape.hidden), "up": (shape.mlp, shape.hidden), "down": (shape.hidden, shape.mlp)}
        self.layers = [self._weights(sizes) for _ in range(LAYERS)]
        self.head = self._weights({"head": (VOCABULARY, shape.hidden)})
        self.operator = torch.classes.ropewalk.Decoder(
            *(shape.hidden, shape.heads, shape.kv_heads, shape.dim, shape.mlp, EPSILON),
            *(shape.interleaved, shape.dtype == torch.bfloat16),
        )
        for layer in self.layers:
            self.operator.add_layer(*self._arguments(layer), shape.dim**-0.5, shape.window)
        self.operator.set_head(self.head["norm"], pack(self.head["head"]), self._padded(self.head, "head"), VOCABULARY)
        page = (PAGES, PAGE_SIZE, shape.kv_heads, shape.dim)
        self.keys, self.values = ([torch.full(page, torch.nan, dtype=shape.dtype) for _ in range(LAYERS)] for _ in "kv")

    def _weights(self, sizes: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
        shape, normal = self.shape, self._normal
        weights = {name: normal(*size) / size[1] ** 0.5 for name, size in sizes.items()}
        if shape.biases:
            weights |= {f"{name} bias": normal(outputs) for name, (outputs, _) in sizes.items()}
        gains = {"norm": shape.hidden, "mlp norm": shape.hidden, "query norm": shape.dim, "key norm": shape.dim}
        weights |= {name: 1 + normal(size) / 4 for name, size in gains.items()}
        return {name: weight.to(shape.dtype) for name, weight in weights.items()}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _padded(self, weights: dict[str, torch.Tensor], *names: str) -> torch.Tensor | None:
        if not self.shape.biases:
            return None
        parts = [pad(weights[f"{name} bias"].float(), (0, -len(weights[f"{name} bias"]) % 32)) for name in names]
        return torch.stack([part.view(-1, 32) for part in parts], dim=1).flatten()

    def _arguments(self, layer: dict[str, torch.Tensor]) -> list[Any]:
        norms = [layer["query norm"], layer["key norm"]] if self.shape.head_norms else [None, None]
        gate_up = torch.stack([pack(layer["gate"]), pack(layer["up"])], dim=1).flatten(0, 1)
        return [
            *(layer["norm"], *norms, layer["mlp norm"]),
            *(pack(layer["qkv"]), self._padded(layer, "qkv")),
            *(pack(layer["output"]), self._padded(layer, "output")),
            *(gate_up, self._padded(layer, "gate", "up")),
            *(pack(layer["down"]), self._padded(layer, "down")),
        ]

    def sequence(self, length: int) -> "Text":
        """A sequence of random embedded tokens at random angles."""
        angles = 3 * self._normal(length, self.shape.pairs)
        return Text(self._normal(length, self.shape.hidden).to(self.shape.dtype), angles.cos(), angles.sin())

    def arguments(
        self, texts: Sequence["Text"], tables: Sequence[list[int]], done: Sequence[int], upto: Sequence[int]
    ) -> dict[str, Any]:
        """For computing tokens done[i] … upto[i] of each sequence, and logits of all of them."""
        parts = [slice(first, last) for first, last in zip(done, upto, strict=True)]
        slots = [
            table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
            for table, first, last in zip(tables, done, upto, strict=True)
            for place in range(first, last)
        ]
        lengths = torch.tensor([last - first for first, last in zip(done, upto, strict=True)])
        most = max(map(len, tables))
        tokens = {
            name: torch.cat([getattr(text, name)[part] for text, part in zip(texts, parts, strict=True)])
            for name in ("embedded", "cos", "sin")
        }
        return {
            **tokens,
            "slots": [torch.tensor(slots)],
            "cu_seq_q": pad(lengths.cumsum(0), (1, 0)).int(),
            "key_lengths": torch.tensor(upto, dtype=torch.int32),
            "block_tables": [torch.tensor([table + [0] * (most - len(table)) for table in tables], dtype=torch.int32)],
            "group_of": [0] * len(self.layers),
            "logits_at": torch.arange(len(slots)),
            **{"keys": self.keys, "values": self.values, "key_scales": [], "value_scales": [], "deterministic": False},
        }

    def step(
        self, texts: Sequence["Text"], tables: Sequence[list[int]], done: Sequence[int], upto: Sequence[int]
    ) -> torch.Tensor:
        logits: torch.Tensor = self.operator.forward(*self.arguments(texts, tables, done, upto).values())
        return logits

    def by_definition(self, text: "Text") -> torch.Tensor:
        """Logits of every token of a sequence, float64 [length, vocabulary]."""
        hidden = text.embedded.double()
        for layer in self.layers:
            hidden = hidden + _linear(layer, "output", self._attention(layer, text, _norm(hidden, layer["norm"])))
            x = _norm(hidden, layer["mlp norm"])
            hidden = hidden + _linear(layer, "down", silu(_linear(layer, "gate", x)) * _linear(layer, "up", x))
        return _linear(self.head, "head", _norm(hidden, self.head["norm"]))

    def _attention(self, layer: dict[str, torch.Tensor], text: "Text", x: torch.Tensor) -> torch.Tensor:
        shape, length = self.shape, len(x)
        heads = _linear(layer, "qkv", x).view(length, -1, shape.dim)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if shape.head_norms:
            query, key = _norm(query, layer["query norm"]), _norm(key, layer["key norm"])
        query, key = (self._rotated(rows, text) for rows in (query, key))
        group = shape.heads // shape.kv_heads
        logits = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, dim=1)) * shape.dim**-0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (shape.window or length))
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, dim=1)).flatten(1)

    def _rotated(self, rows: torch.Tensor, text: "Text") -> torch.Tensor:
        pairs, step = self.shape.pairs, 2 if self.shape.interleaved else 1
        first = torch.arange(pairs) * step
        second = first + (1 if self.shape.interleaved else pairs)
        cos, sin = text.cos.double()[:, None], text.sin.double()[:, None]
        rotated = rows.clone()
        rotated[..., first] = rows[..., first] * cos - rows[..., second] * sin
        rotated[..., second] = rows[..., second] * cos + rows[..., first] * sin
        return rotated


@dataclass(frozen=True)
class Text:
    """Embedded tokens [length, hidden] and their angles' cos and sin [length, pairs]."""

    embedded: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def _linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    bias = weights.get(f"{name} bias")
    return x @ weights[name].double().T + (0 if bias is None else bias.double())


def _norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt() * gain.double()


@st.composite
def shapes(draw: st.DrawFn, dtype: torch.dtype, least_hidden: int = 1) -> Shape:
    kv_heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 16, 20, 64]))
    return Shape(
        hidden=draw(st.integers(least_hidden, 100)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        dim=dim,
        pairs=draw(st.integers(1, dim // 2)),
        mlp=draw(st.integers(1, 100)),
        window=draw(st.sampled_from([0, 0, 1, 3, 9])),
        biases=draw(st.booleans()),
        head_norms=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        dtype=dtype,
    )


def tables_for(lengths: Sequence[int], seed: int) -> list[list[int]]:
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = []
    for length in lengths:
        count = -(-length // PAGE_SIZE)
        tables.append(order[:count])
        order = order[count:]
    return tables


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=3)
"""Of each sequence: tokens of the first and of the second step."""


def logits_in_two_steps(
    decoder: Decoder, lengths: list[tuple[int, int]], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all tokens, one sequence after another: as computed in two steps, and by definition."""
    totals = [sum(pair) for pair in lengths]
    texts, tables = [decoder.sequence(total) for total in totals], tables_for(totals, seed)
    firsts = [first for first, _ in lengths]
    steps = [
        decoder.step(texts, tables, [0] * len(lengths), firsts).split(firsts),
        decoder.step(texts, tables, firsts, totals).split([second for _, second in lengths]),
    ]
    computed = torch.cat([part for pair in zip(*steps, strict=True) for part in pair])
    return computed, torch.cat([decoder.by_definition(text) for text in texts])


@settings(deadline=None, max_examples=120)
@given(
    shape=shapes(torch.float32, least_hidden=8),  # RMSNorm of one number or two is little more than a sign
    lengths=LENGTHS,
    level=st.sampled_from(list(Level)),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_a_float32_decoder_computes_its_definition_over_pages_step_by_step(
    shape: Shape, lengths: list[tuple[int, int]], level: Level, threads: int, seed: int
) -> None:
    torch.set_num_threads(threads)
    ops.limit_level(level)
    computed, expected = logits_in_two_steps(Decoder(shape, seed), lengths, seed)
    assert float((computed - expected).norm() / expected.norm()) < 1e-5


@settings(deadline=None, max_examples=120)
@given(
    shape=shapes(torch.bfloat16, least_hidden=24),  # RMSNorm of few numbers magnifies what rounding did to them
    lengths=LENGTHS,
    level=st.sampled_from(list(Level)),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_a_bfloat16_decoder_is_off_by_its_few_roundings_alone(
    shape: Shape, lengths: list[tuple[int, int]], level: Level, threads: int, seed: int
) -> None:
    torch.set_num_threads(threads)
    ops.limit_level(level)
    computed, expected = logits_in_two_steps(Decoder(shape, seed), lengths, seed)
    assert float((computed - expected).norm() / expected.norm()) < 10 * 2**-8


PLAIN = Shape(40, 6, 2, 16, 8, 70, 0, False, True, False, torch.bfloat16)


@pytest.mark.parametrize("level", list(Level))
def test_decoding_tokens_get_the_same_bits_alone_and_beside_any_others(level: Level) -> None:
    ops.limit_level(level)
    lengths = [9, 3, 14, 1, 6]
    decoder = Decoder(PLAIN, 0)
    texts, tables = [decoder.sequence(length) for length in lengths], tables_for(lengths, 0)
    before = [length - 1 for length in lengths]
    prefilled = [place for place, length in enumerate(before) if length]

    def some(places: list[int], done: list[int], upto: list[int]) -> Any:
        chosen = [texts[place] for place in places], [tables[place] for place in places]
        return decoder.step(*chosen, [done[place] for place in places], [upto[place] for place in places])

    some(prefilled, [0] * len(lengths), before)
    together = some([0, 1, 2, 3, 4], before, lengths)
    for place in range(len(lengths)):
        assert torch.equal(some([place], before, lengths)[0], together[place])


def test_more_tokens_than_ever_before_and_then_fewer_leave_nothing_behind() -> None:
    decoder = Decoder(replace(PLAIN, hidden=33, mlp=41, dtype=torch.float32), 1)
    for length in (2, 70, 3, 80, 1):
        text = decoder.sequence(length)
        computed = decoder.step([text], tables_for([length], 0), [0], [length])
        expected = decoder.by_definition(text)
        assert float((computed - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_lengths": torch.tensor([9], dtype=torch.int32)}, "lengths and pages disagree"),
        ({"key_lengths": torch.tensor([7], dtype=torch.int32)}, "lengths and pages disagree"),
        ({"cu_seq_q": torch.tensor([0, 7], dtype=torch.int32)}, "cu_seq_q"),
        ({"slots": [torch.arange(1, 9) * PAGE_SIZE * PAGES // 8]}, "slot"),
        ({"slots": [torch.arange(7)]}, "slots"),
        ({"slots": []}, "slots"),
        ({"group_of": []}, "group_of"),
        ({"group_of": [1, 0]}, "in none of the groups"),
        ({"group_of": [0, -1]}, "in none of the groups"),
        ({"embedded": torch.zeros(8, 39, dtype=torch.bfloat16)}, "embedded"),
        ({"cos": torch.zeros(8, 9)}, "cos"),
        ({"sin": torch.zeros(8, 7)}, "sin"),
        ({"keys": []}, "pages"),
        ({"block_tables": [torch.zeros(1, 2, dtype=torch.int64)]}, "block_table"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    decoder = Decoder(PLAIN, 0)
    arguments = decoder.arguments([decoder.sequence(8)], [[0, 1]], [0], [8])
    decoder.operator.forward(*arguments.values())
    with pytest.raises(RuntimeError, match=message):
        decoder.operator.forward(*(arguments | changed).values())


def test_no_logits_may_be_asked_for() -> None:
    decoder = Decoder(PLAIN, 0)
    arguments = decoder.arguments([decoder.sequence(8)], [[0, 1]], [0], [8])
    logits = decoder.operator.forward(*(arguments | {"logits_at": torch.empty(0, dtype=torch.int64)}).values())
    assert logits.shape == (0, VOCABULARY)
