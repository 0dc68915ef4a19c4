"""Where a process finds itself among those that torchrun has started."""

import pytest

from service.distributed.place import Place, given_place
from service.errors import StartupError


def test_a_process_that_nobody_else_started_has_no_place() -> None:
    assert given_place({}, 1) is None
    assert given_place({"RANK": "0"}, 2) is None


def test_torchruns_variables_are_the_place() -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    place = given_place(environment, 8)
    assert place == Place(rank=5, local_rank=1, size=8, local_size=4)
    assert not place.leads


def test_without_local_variables_all_are_on_one_machine() -> None:
    assert given_place({"RANK": "0", "WORLD_SIZE": "2"}, 2) == Place(0, 0, 2, 2)


def test_another_number_of_processes_than_the_setting_says_is_refused() -> None:
    with pytest.raises(StartupError, match=r"tensor_parallel is 2, but WORLD_SIZE, .* is 4"):
        given_place({"RANK": "0", "WORLD_SIZE": "4"}, 2)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(StartupError, match="RANK must be a whole number, it is 'first'"):
        given_place({"RANK": "first", "WORLD_SIZE": "2"}, 2)
