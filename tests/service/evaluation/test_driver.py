"""The engine without threads: what it is asked for, and what becomes of its failures."""

from pathlib import Path
from typing import Any

import pytest

from service.cache.pages import PageAllocator
from service.evaluation.driver import Driver
from service.evaluation.errors import EvaluationError
from service.evaluation.schemes import SchemeAsked, choose, fixed, growing, native_plan
from tests.fakes import PAGE_SIZE, FakeRunner, expected_output
from tests.service.evaluation.tiny import TinyBench
from tests.serving import byte_tokenizer


def test_it_generates_greedily_what_the_engine_chooses() -> None:
    runner = FakeRunner(16)
    driver = Driver(runner, PageAllocator(16, PAGE_SIZE), byte_tokenizer().backend_tokenizer, max_batch_tokens=8)
    policy = TinyBench(Path("/dev/null")).policy
    text = driver.generate(list(b"hello"), fixed(native_plan(policy), 40), 12)
    assert text == bytes(expected_output(list(b"hello"), 12)).decode()


def test_digests_are_equal_for_equal_logits_only(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells")
    plans = {
        name: choose(SchemeAsked(name, factor), tried.policy, 40) for name, factor in (("default", None), ("yarn", 2.0))
    }
    prompt = list(b"The quick brown fox jumps over it")

    def digest(tokens: list[int], name: str) -> str:
        choice = plans[name]
        assert choice is not None
        return tried.bench.driver.score(tokens, choice).digest

    first = digest(prompt, "default")
    assert digest(prompt, "default") == first
    assert (
        len({first, digest(prompt, "yarn"), digest([*prompt[:-1], 70], "default"), digest(prompt[:-1], "default")}) == 4
    )


def test_a_prompt_is_scored_whatever_the_cache_holds(tmp_path: Path) -> None:
    tried = TinyBench(tmp_path / "cells")
    choice = fixed(native_plan(tried.policy), 40)
    prompt = list(b"The quick brown fox jumps over it")
    tried.bench.driver.generate(prompt, choice, 3)
    assert tried.pages.num_kept > 0
    assert len(tried.bench.driver.score(prompt, choice).nll) == len(prompt) - 1


def test_forced_tokens_grow_through_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = TinyBench(tmp_path / "cells", native_length=18)
    moved: list[tuple[float, float]] = []
    monkeypatch.setattr(tried.runner, "rerotate", lambda move: moved.append((move.old.factor, move.new.factor)))
    text = list(b"The quick brown fox jumps over the lazy dog.")
    tried.bench.driver.force(text[:10], text[10:30], growing(tried.policy, "rerotate", 20))
    assert moved == [(1.0, 1.25), (1.25, 1.5), (1.5, 2.0)]
    tried.bench.driver.force(text[:10], text[10:30], growing(tried.policy, "rerotate", 20), stale=True)
    tried.bench.driver.force(text[:10], text[10:30], growing(tried.policy, "reprefill", 20))
    assert len(moved) == 3


def test_what_does_not_fit_is_refused_and_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = TinyBench(tmp_path / "cells")
    with pytest.raises(EvaluationError, match="321 tokens do not fit the cache's 320"):
        tried.bench.driver.score([1] * 320, fixed(native_plan(tried.policy), 400))
    with pytest.raises(EvaluationError, match="330 tokens"):
        tried.bench.driver.force([1] * 320, [1] * 10, fixed(native_plan(tried.policy), 400))

    def fail(_step: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(tried.runner, "forward", fail)
    with pytest.raises(EvaluationError, match="the engine failed: MemoryError"):
        tried.bench.driver.score([1, 2], fixed(native_plan(tried.policy), 40))
