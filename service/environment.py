"""Which variables of the environment are settings, and which of the others may be there.

Knows names and where they come from. Does not know what a setting means, and changes nothing.
"""

import re
from collections.abc import Iterable, Mapping

from service.errors import StartupError
from service.suggest import did_you_mean

PREFIX = "ROPEWALK_"
READ_ELSEWHERE = frozenset({"ROPEWALK_CACHE"})  # by model_patches.loading.cache
SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")


def variable_of(setting: str) -> str:
    """The variable that a setting may come from."""
    return PREFIX + setting.upper()


def is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes set a variable: it does so in every pod, for every Service of the namespace, by its name.

    Of a Service `ropewalk` come ROPEWALK_SERVICE_HOST, ROPEWALK_PORT_8000_TCP and, beside more, ROPEWALK_PORT, which
    is tcp://10.0.0.1:8000 (Kubernetes' documentation, "Service": environment variables).
    """
    name = variable.upper().removeprefix(PREFIX)
    is_address = re.fullmatch(r"(\w+_)?PORT", name) is not None and SERVICE_ADDRESS.fullmatch(value) is not None
    return is_address or SERVICE_LINK.fullmatch(name) is not None


def check_variables(environment: Mapping[str, str], settings: Iterable[str]) -> None:
    """Refuse variables that look like settings and are none. Empty ones count as not set.

    Args:
        environment: value by name.
        settings: the names of all settings.

    Raises:
        StartupError: the message names them, and the settings that were probably meant.
    """
    known = [name.upper() for name in settings]
    problems = []
    for variable, value in environment.items():
        name = variable.upper().removeprefix(PREFIX)
        is_ours = variable.upper().startswith(PREFIX) and value != ""
        if is_ours and name not in known and variable not in READ_ELSEWHERE and not is_service_link(variable, value):
            elsewhere = [other.removeprefix(PREFIX) for other in READ_ELSEWHERE]
            guess = did_you_mean(name, [*known, *elsewhere], prefix=PREFIX)
            problems.append(f"the variable {variable} is not a setting{guess}")
    if problems:
        raise StartupError("; ".join(problems))
