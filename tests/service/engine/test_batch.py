"""The layout of a step, against the same layout computed token by token in plain Python."""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_patches.pages import KeyValuePages, PagedTensor
from service.cache.groups import LayerGroup
from service.core import PageTable, SamplingParams, Sequence
from service.engine import batch
from service.scaling.policy import Policy, RopeWish
from tests.fakes import GEOMETRY

POLICY = Policy(GEOMETRY)
CHOICES = [POLICY.choose(1, 1, RopeWish(factor=factor)) for factor in (1.0, 2.0, 4.0)]
PLAN_ROWS = {choice.plan: 5 + row for row, choice in enumerate(CHOICES)}
NUM_PAGES = 200


@dataclass(frozen=True)
class Row:
    """One sequence of a step: so many tokens of each kind, and its plan."""

    prompt: int
    output: int
    computed: int
    tokens: int
    spare_pages: int
    plan: int


@st.composite
def rows(draw: st.DrawFn) -> Row:
    prompt, output = draw(st.integers(1, 20)), draw(st.integers(0, 6))
    computed = draw(st.integers(0, prompt + output - 1))
    tokens = draw(st.integers(1, prompt + output - computed))
    return Row(prompt, output, computed, tokens, draw(st.integers(0, 2)), draw(st.sampled_from(range(len(CHOICES)))))


@settings(deadline=None)
@given(
    step_rows=st.lists(rows(), min_size=1, max_size=6), page_size=st.sampled_from([1, 2, 4, 16]), seed=st.integers(0)
)
def test_every_token_has_its_id_position_plan_and_slot(step_rows: list[Row], page_size: int, seed: int) -> None:
    random = Random(seed)
    step = make_step(step_rows, page_size, random)
    layer = empty_layer(page_size)

    built = batch.build(step, [layer], PLAN_ROWS.__getitem__, torch.device("cpu"))

    token_ids: list[int] = []
    positions: list[int] = []
    plan_rows: list[int] = []
    slots: list[int] = []
    logits_at: list[int] = []
    for sequence, count in step.items():
        known = sequence.prompt + sequence.output
        for position in range(sequence.num_computed, sequence.num_computed + count):
            token_ids.append(known[position])
            positions.append(position)
            plan_rows.append(PLAN_ROWS[sequence.choice.plan])
            slots.append(sequence.tables[0].pages[position // page_size] * page_size + position % page_size)
            if position == len(known) - 1:
                logits_at.append(len(token_ids) - 1)
    assert built.token_ids.tolist() == token_ids
    assert built.positions.tolist() == positions
    assert built.plan_rows.tolist() == plan_rows
    assert built.batch.slots.tolist() == slots
    assert built.logits_at.tolist() == logits_at


@settings(deadline=None)
@given(
    step_rows=st.lists(rows(), min_size=1, max_size=6), page_size=st.sampled_from([1, 2, 4, 16]), seed=st.integers(0)
)
def test_lengths_and_block_tables_say_where_each_sequence_lies(step_rows: list[Row], page_size: int, seed: int) -> None:
    step = make_step(step_rows, page_size, Random(seed))
    layers = [empty_layer(page_size)]

    paged = batch.build(step, layers, PLAN_ROWS.__getitem__, torch.device("cpu")).batch

    query_lengths = [row.tokens for row in step_rows]
    key_lengths = [row.computed + row.tokens for row in step_rows]
    assert (paged.query_lengths, paged.key_lengths) == (query_lengths, key_lengths)
    assert paged.cu_seq_q.tolist() == [sum(query_lengths[:row]) for row in range(len(step_rows) + 1)]
    assert paged.cu_seq_k.tolist() == [sum(key_lengths[:row]) for row in range(len(step_rows) + 1)]
    assert paged.seqused_k.tolist() == key_lengths
    widest = max(len(sequence.tables[0].pages) for sequence in step)
    assert paged.block_table.shape == (len(step), widest)
    for table, sequence in zip(paged.block_table.tolist(), step, strict=True):
        assert table == [*sequence.tables[0].pages, *[0] * (widest - len(sequence.tables[0].pages))]
    assert paged.layers is layers
    int32 = {paged.block_table, paged.cu_seq_q, paged.cu_seq_k, paged.seqused_k}
    assert {tensor.dtype for tensor in int32} == {torch.int32}
    assert paged.slots.dtype == torch.int64


def test_each_group_of_layers_has_its_own_slots_and_block_table() -> None:
    page_size = 4
    groups = [LayerGroup((1,), None), LayerGroup((0, 2), 6)]
    sequence = Sequence("a", list(range(30)), CHOICES[0], SamplingParams(1), deliver=lambda _: None)
    sequence.num_computed = 21
    sequence.tables = [PageTable(0, [7, 3, 9, 1, 8, 30, 31, 32]), PageTable(4, [20, 5, 6])]
    short = Sequence("b", [1, 2, 3], CHOICES[0], SamplingParams(1), deliver=lambda _: None)
    short.tables = [PageTable(0, [40]), PageTable(0, [41])]
    layers = [empty_layer(page_size) for _ in range(3)]
    step = {sequence: 5, short: 3}
    paged = batch.build(step, layers, PLAN_ROWS.__getitem__, torch.device("cpu"), groups).batch
    whole, windowed = paged.of_layer(1), paged.of_layer(0)
    assert windowed is paged.of_layer(2)
    assert (whole.window, windowed.window) == (None, 6)
    assert whole.block_table.tolist() == [[7, 3, 9, 1, 8, 30, 31, 32], [40, *[0] * 7]]
    assert windowed.block_table.tolist() == [[0, 0, 0, 0, 20, 5, 6], [41, *[0] * 6]]
    assert whole.slots.tolist() == [121, 122, 123, 124, 125, 160, 161, 162]
    assert windowed.slots.tolist() == [21, 22, 23, 24, 25, 164, 165, 166]
    assert windowed.key_lengths == whole.key_lengths == [26, 3]
    assert windowed.spans(6) is not whole.spans(6)
    assert windowed.mask(5, 26, 6, torch.float32) is whole.mask(5, 26, 6, torch.float32)


def empty_layer(page_size: int) -> KeyValuePages:
    return KeyValuePages(*(PagedTensor(torch.zeros(NUM_PAGES, page_size, 1, 2)) for _ in range(2)))


def make_step(step_rows: list[Row], page_size: int, random: Random) -> dict[Sequence, int]:
    """Sequences of random tokens in random pages, none shared."""
    free = random.sample(range(NUM_PAGES), NUM_PAGES)
    step = {}
    for number, row in enumerate(step_rows):
        prompt = [random.randrange(1000) for _ in range(row.prompt)]
        sampling = SamplingParams(max_tokens=row.output + 1)
        sequence = Sequence(str(number), prompt, CHOICES[row.plan], sampling, deliver=lambda _: None)
        sequence.output = [random.randrange(1000) for _ in range(row.output)]
        sequence.num_computed = row.computed
        needed = -(-(row.prompt + row.output) // page_size) + row.spare_pages
        sequence.tables, free = [PageTable(0, free[:needed])], free[needed:]
        step[sequence] = row.tokens
    return step
