"""Tasks of retrieval: what is built, and how answers are scored."""

import re

import pytest

from service.evaluation.errors import EvaluationError
from service.evaluation.retrieval import NEEDLES, TASKS, Question, is_answered
from tests.service.evaluation.tiny import text_of
from tests.serving import byte_tokenizer

TOKENIZER = byte_tokenizer().backend_tokenizer
HAY = list(text_of(3000).encode())


def built(task: str, length: int = 1000, depth: float = 0.5, seed: int = 0) -> tuple[Question, str]:
    question = TASKS[task](TOKENIZER, HAY, length, depth, seed)
    return question, bytes(question.prompt).decode()


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("task", ["passkey", "needle", "needles"])
def test_prompts_are_exact_and_hold_the_answer_at_its_depth(task: str, depth: float) -> None:
    question, text = built(task, depth=depth)
    assert len(question.prompt) + question.max_tokens == 1000
    places = [found.start() for found in re.finditer(question.answer, text)]
    assert len(places) == (2 if task == "passkey" else 1)
    asked = text.rindex("\nWhat is")
    assert places[0] / asked == pytest.approx(depth, abs=0.25 if task == "needles" else 0.12)
    assert text.endswith(" is")


def test_the_haystack_is_the_text_uncut_around_the_needle() -> None:
    question, text = built("needle", depth=0.5)
    before, after = text.split(f"\nThe secret number of the {text.split()[-2]} is {question.answer}.\n")
    hay = before + after[: after.rindex("\nWhat is")]
    assert hay == text_of(3000)[: len(hay)]


def test_the_multi_key_form_has_others_and_asks_for_one() -> None:
    question, text = built("needles", length=1500)
    needles = dict(re.findall(r"secret number of the (\w+) is (\d{7})\.", text))
    assert len(needles) == NEEDLES
    asked = re.findall(r"The secret number of the (\w+) is$", text)
    assert [needles[key] for key in asked] == [question.answer]


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_asks_the_same_at_every_depth_and_another_asks_something_else(task: str) -> None:
    answers = {built(task, depth=depth, seed=5)[0].answer for depth in (0.0, 0.5, 1.0)}
    assert len(answers) == 1
    assert built(task, seed=6)[0].answer not in answers
    assert built(task, seed=5) == built(task, seed=5)


def test_key_values_fill_the_prompt_and_the_right_pair_is_at_its_place() -> None:
    for depth, place in ((0.0, 0), (0.5, None), (1.0, -1)):
        question, text = built("key-value", length=1500, depth=depth)
        pairs = re.findall(r'"([0-9a-f-]{36})": "([0-9a-f-]{36})"', text)
        assert len(question.prompt) + question.max_tokens <= 1500 < len(question.prompt) + question.max_tokens + 90
        key = re.findall(r'the value of "(.*)" is "$', text)[0]
        found = pairs.index((key, question.answer))
        assert found == (round((len(pairs) - 1) / 2) if place is None else place % len(pairs))


def test_what_is_too_short_is_refused() -> None:
    with pytest.raises(EvaluationError, match="60 tokens"):
        built("needle", length=60)
    with pytest.raises(EvaluationError, match="100 tokens"):
        built("key-value", length=100)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" 12345.", True),
        ("12345", True),
        (': "12345", and', True),
        ("\n12345\n", True),
        ("123456", False),
        ("1234", False),
        (" not 12345", False),
        ("912345", False),
        ("", False),
        ("12345a", False),
    ],
)
def test_an_answer_comes_first_and_whole(text: str, found: bool) -> None:
    assert is_answered(Question([], "12345", 9), text) is found
