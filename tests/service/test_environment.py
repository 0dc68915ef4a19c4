"""Variables that look like settings are settings, or known to be none."""

import re
from pathlib import Path

import pytest

from service.environment import READ_ELSEWHERE, check_variables, is_service_link, variable_of
from service.errors import StartupError
from service.settings import Settings

ADDRESS = "tcp://10.0.0.1:8000"
LINKS = {
    "ROPEWALK_SERVICE_HOST": "10.0.0.1",
    "ROPEWALK_SERVICE_PORT": "8000",
    "ROPEWALK_SERVICE_PORT_HTTP": "8000",
    "ROPEWALK_PORT": ADDRESS,
    "ROPEWALK_PORT_8000_TCP": ADDRESS,
    "ROPEWALK_PORT_8000_TCP_PROTO": "tcp",
    "ROPEWALK_PORT_8000_TCP_PORT": "8000",
    "ROPEWALK_PORT_8000_TCP_ADDR": "10.0.0.1",
    "ROPEWALK_PORT_53_UDP": "udp://10.0.0.1:53",
}
"""What Kubernetes sets for a Service `ropewalk`."""


def test_settings_and_what_others_set_may_be_there() -> None:
    settings = {variable_of(name): "x" for name in Settings.model_fields}
    lower = {"ropewalk_max_running": "5", "XROPEWALK_FOO": "5", "ROPEWALK": "5"}
    check_variables({**settings, **lower, **dict.fromkeys(READ_ELSEWHERE, "x"), "PATH": "x"}, Settings.model_fields)


@pytest.mark.parametrize("service", ["ROPEWALK", "ROPEWALK_CANARY"])
def test_what_kubernetes_sets_for_services_may_be_there(service: str) -> None:
    links = {name.replace("ROPEWALK", service): value for name, value in LINKS.items()}
    assert all(is_service_link(name, value) for name, value in links.items())
    check_variables(links, Settings.model_fields)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ROPEWALK_PORT", "8000"), ("ROPEWALK_HOST", ADDRESS), ("ROPEWALK_MAX_RUNNING", ADDRESS)],
)
def test_a_setting_is_no_link(variable: str, value: str) -> None:
    assert not is_service_link(variable, value)


@pytest.mark.parametrize(
    ("variable", "guess"),
    [
        ("ROPEWALK_MAX_RUNING", ": did you mean ROPEWALK_MAX_RUNNING?"),
        ("ropewalk_max_runing", ": did you mean ROPEWALK_MAX_RUNNING?"),
        ("ROPEWALK_CACH", ": did you mean ROPEWALK_CACHE?"),
        ("ROPEWALK_CONFIG", ""),
        ("ROPEWALK_CANARY_PORT", ""),
        ("ROPEWALK_", ""),
    ],
)
def test_any_other_is_refused_with_the_nearest_one(variable: str, guess: str) -> None:
    with pytest.raises(StartupError) as refusal:
        check_variables({variable: "5"}, Settings.model_fields)
    assert str(refusal.value) == f"the variable {variable} is not a setting{guess}"


def test_all_of_them_are_named() -> None:
    with pytest.raises(StartupError, match=r"ROPEWALK_X .*; .* ROPEWALK_Y "):
        check_variables({"ROPEWALK_X": "5", "ROPEWALK_Y": "5"}, Settings.model_fields)


def test_an_empty_one_counts_as_not_set() -> None:
    check_variables({"ROPEWALK_MAX_RUNING": ""}, Settings.model_fields)


def test_what_the_program_reads_elsewhere_is_known() -> None:
    root = Path(__file__).parents[2]
    sources = [file.read_text() for folder in ("service", "model_patches") for file in (root / folder).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"(?:environ|getenv)\b.*?\"(ROPEWALK_\w+)\"", text)}
    assert read == READ_ELSEWHERE
