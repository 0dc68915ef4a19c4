"""Which replica a request goes to. Knows names of replicas, how busy they are and what they have computed; does not
know Ray, HTTP or tokens.

    its beginning is held    the replica that holds the longest part of it under its plan: what is cached need not be
                             computed again
    a long plan              the replica with the most free cache: what counts there is room
    otherwise                the less busy of two that are picked at random (power of two choices)

A beginning counts as held where an earlier request's whole prompt is a part of it, as in a conversation's next turn,
or where the part is long: it would otherwise be enough that all begin with the same system prompt, and all would go to
one replica. A replica that is much busier than the idlest does not get a request for its cache's sake.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MOST_KNOWN_PAGES = 65_536
LONG_SHARE = 0.5  # of a prompt's pages, and
LONG_PAGES = 16  # so many at least, are a long part
BUSIER_BY = 8
BUSIER_TIMES = 2


@dataclass(frozen=True)
class Beginning:
    """How a request begins, as far as that tells where it should run.

    Attributes:
        digests: of the prompt's full pages, each over all tokens up to its end.
        plan: of the plan that the request starts under.
        any_plan: whether it can use what was computed under other plans.
        long_tokens: tokens that it may come to hold in the cache, 0 for one under the native plan.
    """

    digests: tuple[bytes, ...]
    plan: bytes
    any_plan: bool = False
    long_tokens: int = 0


class Load(NamedTuple):
    """What is known of a replica's business.

    Attributes:
        ongoing: requests that it has and that have not ended.
        free_tokens: of its cache, as it last said; None before it has said so.
    """

    ongoing: int
    free_tokens: int | None


class Held(NamedTuple):
    """Who has computed a page, and whether it was the last of a request's prompt."""

    replica: str
    is_end: bool


class Placement:
    """Chooses replicas, and remembers what they hold. Used on one event loop."""

    def __init__(
        self, capacity: int, *, most_known_pages: int = MOST_KNOWN_PAGES, chance: random.Random | None = None
    ) -> None:
        """
        Args:
            capacity: requests that a replica takes, those that wait included.
            most_known_pages: pages that are remembered; those that were asked for longest ago are forgotten first.
            chance: picks the two.
        """
        self._capacity = capacity
        self._most_known_pages = most_known_pages
        self._chance = chance or random.Random()
        self._known: OrderedDict[bytes, dict[bytes, Held]] = OrderedDict()
        self._promised: Counter[str] = Counter()
        self._said_free: dict[str, int | None] = {}

    @property
    def num_known_pages(self) -> int:
        return len(self._known)

    def choose(self, beginning: Beginning | None, loads: Mapping[str, Load]) -> list[str]:
        """All replicas, the best first; the others in the order of their business.

        Args:
            beginning: of the request; None where nothing is known of it.
            loads: of every replica that runs.
        """
        by_load = sorted(loads, key=lambda name: (loads[name].ongoing, self._chance.random()))
        best = self._best(beginning, loads, by_load)
        return [best, *(name for name in by_load if name != best)]

    def note(self, beginning: Beginning | None, replica: str) -> None:
        """Remember that a replica will compute a beginning."""
        if beginning is None:
            return
        digests = beginning.digests
        for digest in reversed(digests):  # a later page is forgotten before an earlier one, without which it is no use
            plans = self._known.setdefault(digest, {})
            known = plans.get(beginning.plan)
            ended_here = known is not None and known.is_end and known.replica == replica
            plans[beginning.plan] = Held(replica, digest is digests[-1] or ended_here)
            self._known.move_to_end(digest)
        while len(self._known) > self._most_known_pages:
            self._known.popitem(last=False)

    def _best(self, beginning: Beginning | None, loads: Mapping[str, Load], by_load: list[str]) -> str:
        idlest = loads[by_load[0]].ongoing
        if beginning is not None:
            holder = self._holder(beginning, loads)
            if holder is not None and self._may_have_more(loads[holder].ongoing, idlest):
                return holder
            if beginning.long_tokens:
                return self._roomiest(beginning.long_tokens, loads)
        with_room = [name for name in by_load if loads[name].ongoing < self._capacity] or by_load
        return min(self._chance.sample(with_room, min(2, len(with_room))), key=by_load.index)

    def _may_have_more(self, ongoing: int, idlest: int) -> bool:
        return ongoing < self._capacity and ongoing <= BUSIER_TIMES * idlest + BUSIER_BY

    def _holder(self, beginning: Beginning, loads: Mapping[str, Load]) -> str | None:
        """Who holds the longest part that is worth it."""
        for number in range(len(beginning.digests), 0, -1):
            plans: Mapping[bytes, Held] = self._known.get(beginning.digests[number - 1], {})
            own = plans.get(beginning.plan)
            found: list[Held] = [*([own] if own else []), *(plans.values() if beginning.any_plan else ())]
            is_long = number >= max(LONG_PAGES, LONG_SHARE * len(beginning.digests))
            for held in found:
                if held.replica in loads and (held.is_end or is_long):
                    return held.replica
        return None

    def _roomiest(self, tokens: int, loads: Mapping[str, Load]) -> str:
        """Who has the most free cache, less what others were sent for since it last said."""
        for name, load in loads.items():
            if self._said_free.get(name) != load.free_tokens:
                self._said_free[name] = load.free_tokens
                del self._promised[name]

        def room(name: str) -> tuple[int, int]:
            return (loads[name].free_tokens or 0) - self._promised[name], -loads[name].ongoing

        best = max(loads, key=room)
        self._promised[best] += tokens
        return best
