"""What travels to the other ranks says as much of a step as the sequences themselves."""

import pickle
from typing import Any

import torch

from model_patches.pages import KeyValuePages, PagedTensor
from service.core import PageCopy, PageMove, PageTable, Rerotation, SamplingParams, Sequence
from service.distributed.calls import Call, Copy, Forward, Rerotate
from service.engine import batch
from service.scaling.policy import Policy, RopeWish
from tests.fakes import GEOMETRY

CPU = torch.device("cpu")
POLICY = Policy(GEOMETRY)


def sequence(prompt: int, computed: int, factor: float, pages: list[int], **sampling: Any) -> Sequence:
    choice = POLICY.choose(prompt, 10, RopeWish(factor=factor) if factor > 1 else None)
    params = SamplingParams(max_tokens=10, **sampling)
    made = Sequence(f"{prompt} {computed}", list(range(prompt)), choice, params, deliver=lambda _: None)
    made.num_computed, made.tables = computed, [PageTable(0, pages)]
    return made


def travelled(call: Call) -> Any:
    return pickle.loads(pickle.dumps(call))


def test_a_step_comes_out_the_same_on_the_other_side() -> None:
    drafting = sequence(6, 6, 1, [7, 8])
    drafting.output, drafting.draft = [9], [10, 11]
    step = {
        sequence(9, 0, 1, [3, 1, 2], prompt_logprobs=0): 9,
        sequence(20, 8, 2, [4, 5, 6]): 4,
        drafting: 3,
    }
    pool = KeyValuePages(*(PagedTensor.allocate((12, 4, 1, 8), torch.float32, CPU) for _ in range(2)))
    rows = {each.plan: number for number, each in enumerate(step)}
    expected = batch.build(step, [pool], rows.__getitem__, CPU)

    call: Forward = travelled(Forward.of(step))
    built = batch.build({part: len(part.token_ids) for part in call.parts}, [pool], rows.__getitem__, CPU)

    for name in ("token_ids", "positions", "plan_rows", "logits_at"):
        assert torch.equal(getattr(built, name), getattr(expected, name)), name
    for name in ("slots", "block_table", "cu_seq_q", "cu_seq_k", "seqused_k"):
        assert torch.equal(getattr(built.batch, name), getattr(expected.batch, name)), name
    assert built.batch.query_lengths == expected.batch.query_lengths
    assert built.batch.key_lengths == expected.batch.key_lengths


def test_a_re_rotation_names_plans_and_pages_and_no_sequence() -> None:
    old, new = (POLICY.choose(20, 10, RopeWish(factor=factor)).plan for factor in (2.0, 4.0))
    moves = [PageMove(3, 3, 0), PageMove(4, 9, 1)]
    call: Rerotate = travelled(Rerotate.of(Rerotation(sequence(20, 8, 2, [3, 4]), old, new, moves, 8)))
    assert (call.old, call.new, call.moves) == (old, new, moves)
    assert call.new.inv_freq == new.inv_freq


def test_copies_name_pages_and_no_sequence() -> None:
    copies = [PageCopy(sequence(20, 6, 1, [2, 5]), (3, 4), (5, 6), 2), PageCopy(sequence(20, 6, 1, [7]), (8,), (9,), 1)]
    call: Copy = travelled(Copy.of(copies))
    assert (call.sources, call.targets) == ([3, 4, 8], [5, 6, 9])
