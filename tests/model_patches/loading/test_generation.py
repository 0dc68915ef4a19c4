"""Where to stop and how to sample, as the model's own files ask for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_patches.errors import DamagedModelError
from model_patches.loading.generation import GenerationDefaults, read_generation_defaults


def defaults(
    folder: Path, asked: dict[str, Any] | None, config: dict[str, Any] | None = None, tokenizer_end: int | None = None
) -> GenerationDefaults:
    if asked is not None:
        (folder / "generation_config.json").write_text(json.dumps(asked))
    return read_generation_defaults(folder, config or {}, tokenizer_end)


@pytest.mark.parametrize(
    ("asked", "config", "tokenizer_end", "expected"),
    [
        ({"eos_token_id": [5, 6, 5]}, {"eos_token_id": 7}, 8, {5, 6}),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, 8, {0}),
        ({"eos_token_id": None}, {"eos_token_id": [7, 9]}, 8, {7, 9}),
        ({}, {"eos_token_id": 0}, 8, {0}),
        (None, {}, 8, {8}),
        (None, {"eos_token_id": []}, 0, {0}),
        (None, {}, None, set()),
    ],
)
def test_the_first_file_that_names_end_tokens_wins(
    tmp_path: Path, asked: Any, config: dict[str, Any], tokenizer_end: int | None, expected: set[int]
) -> None:
    assert defaults(tmp_path, asked, config, tokenizer_end).end_token_ids == expected


def test_sampling_is_taken_over_key_by_key(tmp_path: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults(tmp_path, asked) == GenerationDefaults(frozenset(), temperature=0.6, top_k=20, top_p=0.95)
    assert defaults(tmp_path, {"temperature": 1, "min_p": 0.1}) == GenerationDefaults(
        frozenset(), temperature=1.0, min_p=0.1
    )


def test_a_model_that_says_nothing_leaves_everything_open(tmp_path: Path) -> None:
    assert defaults(tmp_path, {}) == defaults(tmp_path, None) == GenerationDefaults(frozenset())
    assert defaults(tmp_path, {"temperature": None, "top_k": None}) == GenerationDefaults(frozenset())


def test_do_sample_false_asks_for_greedy_whatever_else_it_says(tmp_path: Path) -> None:
    asked = {"do_sample": False, "temperature": 0.6, "top_k": 50}
    assert defaults(tmp_path, asked) == GenerationDefaults(frozenset(), temperature=0.0)


@pytest.mark.parametrize("do_sample", [True, False])
def test_the_repetition_penalty_counts_under_greedy_too(tmp_path: Path, do_sample: bool) -> None:
    assert defaults(tmp_path, {"do_sample": do_sample, "repetition_penalty": 1.1}).repetition_penalty == 1.1


@pytest.mark.parametrize("asked", [{"eos_token_id": "</s>"}, {"temperature": "hot"}, {"top_k": True}])
def test_values_of_the_wrong_type_are_named(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(DamagedModelError, match=next(iter(asked))):
        defaults(tmp_path, asked)
