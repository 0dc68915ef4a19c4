"""How many replicas there should be. Knows what replicas say of themselves; does not know Ray, which calls it.

    replicas = Σ in_use / 0.7 + Σ waiting / 4

`in_use` is the share of a replica in use, of its places in the batch or of its cache, whichever is more; `waiting`
its requests that wait. So replicas are added that bring use down to 70 %, and one for each four requests that wait,
which is what one replica bears.
"""

import math
from collections.abc import Mapping
from typing import Any

USE_THAT_IS_BORNE = 0.7
WAITING_THAT_IS_BORNE = 4


def replicas_wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: of what replicas said lately, the number that there should be and no state.

    Args:
        context: Ray's `AutoscalingContext`.
    """
    said: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    if not said.get("in_use"):
        return context.target_num_replicas, {}  # nobody has said anything yet
    wanted = wanted_of(sum(said["in_use"].values()), sum(said.get("waiting", {}).values()))
    return max(1, wanted), {}


def wanted_of(in_use: float, waiting: float) -> int:
    """The formula above."""
    return math.ceil(round(in_use / USE_THAT_IS_BORNE + waiting / WAITING_THAT_IS_BORNE, 6))
