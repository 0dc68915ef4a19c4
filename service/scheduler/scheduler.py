"""Which request gets how many tokens in the next step. Knows sequences and page counts; no torch here."""

import itertools
import time
from collections import deque
from collections.abc import Iterable

from service.cache.needs import PageNeeds
from service.cache.pages import PageAllocator
from service.core import PageMove, Preparation, Rerotation, Segment, Sequence
from service.scheduler.pace import Pace
from service.scheduler.prefixes import Prefixes

PROMPT_LOGITS_AT_ONCE = 512  # logits of a whole vocabulary after each token take much memory


class Scheduler:
    """Decides each step and owns the sequences that wait and run.

    A step is `{sequence: number of tokens}`: a prefill, a chunk of one and a decode differ only in that number. Before
    it is computed, `take_preparations` has to be carried out.

    Decoding rows come first. What is left of the token budget goes to prompts by deadline: the scheduler's clock counts
    computed tokens, and a prompt of n tokens that starts when the clock shows t is due at t + n, as if it had the
    machine to itself. So a short prompt passes a long one that has much left to do, and a long one is overtaken only
    by prompts that arrived while it could have been served. While requests decode, prompts get what `pace` says.

    A sequence starts when there are pages for all its known tokens. Full pages of a cached prefix are shared with
    others; of a page that fits in part it gets a copy. Of layers that see a window only, it gets as many as it will
    ever need there, and what falls behind the window is given back as it advances. When a running one needs a page and
    none is free, the youngest gives its pages back and is computed again later; its output so far is kept.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_running: int,
        max_batch_tokens: int,
        prefix_caching: bool = True,
        refresh_tokens: int = 0,
        decode_step_seconds: float = 0,
        windows: Iterable[int | None] = (None,),
    ) -> None:
        """
        Args:
            pages: where pages come from and return to.
            max_running: at most so many sequences run at a time.
            max_batch_tokens: at most so many tokens in a step; no less than max_running.
            prefix_caching: whether full pages are kept for other sequences that begin alike.
            refresh_tokens: how many of the latest tokens are computed again after a re-rotation by growth.
            decode_step_seconds: how long a step that decodes should take, see `Pace`.
            windows: for each group of layers, how many of the latest tokens it sees, the token itself included; None
                for all.
        """
        assert max_batch_tokens >= max_running
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.pace = Pace(decode_step_seconds, max_batch_tokens)
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._refresh_tokens = refresh_tokens
        self.needs = PageNeeds(
            pages.page_size, tuple(windows), max_batch_tokens=max_batch_tokens, refresh_tokens=refresh_tokens
        )
        self._prefixes = Prefixes(pages, self.needs, enabled=prefix_caching)
        self._preparations: list[Preparation] = []
        self._promotions: list[Sequence] = []
        self._clock = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Whole, it must fit the pool."""
        assert self.needs.most(sequence.num_tokens_at_most) <= self.pages.num_pages
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended; its pages return at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> dict[Sequence, int]:
        """Choose the next step and give each of its sequences the pages it needs.

        Returns:
            How many tokens of each sequence to compute; empty when there is nothing to do. What
            `take_preparations` returns then has to be carried out first.
        """
        for sequence in list(self.running):
            if sequence.num_computed == sequence.num_computable and sequence in self.running:
                self._change_plan(sequence)
        self._start_waiting()
        step: dict[Sequence, int] = {}
        budget = self._max_batch_tokens
        uncomputed = {sequence: sequence.num_uncomputed for sequence in self.running}
        order = sorted(self.running, key=lambda s: (uncomputed[s] > 1, s.deadline))
        decodes = bool(order) and uncomputed[order[0]] == 1
        for sequence in order:
            tokens = uncomputed[sequence]
            if decodes and tokens > 1:
                budget = min(budget, self.pace.tokens)
            room = min(sequence.num_computable - sequence.num_computed, budget)
            tokens = min(tokens, room)
            if sequence.sampling.prompt_logprobs is not None:
                tokens = min(tokens, PROMPT_LOGITS_AT_ONCE)
            # Without pages it had to give way to one before it.
            if tokens > 0 and sequence.tables and self._extend(sequence, step):
                if sequence.draft:
                    tokens += self._keep_draft(sequence, room - tokens)
                step[sequence] = tokens
                budget -= tokens
        self._clock += sum(step.values())
        for sequence in step:
            if sequence.scheduled_time is None:
                sequence.scheduled_time = time.monotonic()
        return step

    def take_preparations(self) -> list[Preparation]:
        """What has to be carried out, in this order, before the step that was just scheduled."""
        preparations, self._preparations = self._preparations, []
        return preparations

    def take_promotions(self) -> list[Sequence]:
        """The sequences that have moved to a higher rung since the last time."""
        promotions, self._promotions = self._promotions, []
        return promotions

    def complete(self, step: dict[Sequence, int]) -> list[Sequence]:
        """Record that a step was computed. Of a draft it counts nothing: who chooses tokens knows what was right.

        Returns:
            The sequences that now need their next token.
        """
        complete = []
        for sequence, tokens in step.items():
            known = sequence.num_tokens
            sequence.num_computed = min(sequence.num_computed + tokens, known)
            self._prefixes.offer(sequence)
            if sequence.num_computed == known:
                complete.append(sequence)
        return complete

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            # A page to spare for each sequence that runs already, or the newcomer would soon be preempted.
            if not self._attach_pages(self.waiting[0], spare=len(self.running) * self.needs.groups):
                return
            self.running.append(self.waiting.popleft())

    def _attach_pages(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence without pages those for all its known tokens; False if there are too few."""
        for prefix in self._prefixes.candidates(sequence):
            preparations = self._prefixes.attach(sequence, prefix, spare)
            if preparations is not None:
                self._preparations += preparations
                sequence.deadline = self._clock + sequence.num_uncomputed
                if sequence.scheduled_time is None and self._prefixes.enabled:
                    sequence.num_prefix_tokens = sequence.num_computed
                    sequence.num_other_plan_prefix_tokens = prefix.others * self.pages.page_size
                return True
        return False

    def _extend(self, sequence: Sequence, step: dict[Sequence, int]) -> bool:
        """Make sure that a sequence has pages for its next step; False if it had to give way itself."""
        if self.needs.has_windows:
            self._give_back(sequence)
        elif sequence.num_tokens <= sequence.num_placed:
            return True
        while self._missing(sequence, sequence.num_tokens) > self.pages.num_free:
            if self._preempt_youngest(step) is sequence:
                return False
        self._place(sequence, sequence.num_tokens)
        return True

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        """How many pages a sequence lacks for so many tokens."""
        ends = (self.needs.end(group, table.first, tokens) for group, table in enumerate(sequence.tables))
        return sum(max(0, end - table.end) for table, end in zip(sequence.tables, ends, strict=True))

    def _place(self, sequence: Sequence, tokens: int) -> None:
        """Give a sequence the pages that it lacks for so many tokens; they are free."""
        for group, table in enumerate(sequence.tables):
            missing = self.needs.end(group, table.first, tokens) - table.end
            if missing > 0:
                table.pages.extend(self.pages.allocate(missing))
        sequence.num_placed = min(table.end for table in sequence.tables) * self.pages.page_size

    def _give_back(self, sequence: Sequence) -> None:
        """Return the pages that are behind the windows of all tokens still to be computed."""
        for group, table in enumerate(sequence.tables):
            behind = self.needs.first(group, sequence.num_computed) - table.first
            if behind > 0:
                self.pages.release(table.pages[:behind])
                del table.pages[:behind]
                table.first += behind

    def _keep_draft(self, sequence: Sequence, room: int) -> int:
        """Cut a sequence's draft to what there is room for, without taking a page from anybody.

        Args:
            sequence: will be computed to its last known token.
            room: tokens that the step, and the sequence's plan, have left.

        Returns:
            How many tokens of the draft are left.
        """
        more = self.pages.num_free // self.needs.groups * self.pages.page_size
        free = sequence.num_placed + more - sequence.num_tokens
        sequence.draft = sequence.draft[: max(0, min(room, free))]
        if sequence.num_tokens + len(sequence.draft) > sequence.num_placed:
            self._place(sequence, sequence.num_tokens + len(sequence.draft))
        return len(sequence.draft)

    def _change_plan(self, sequence: Sequence) -> None:
        """Move a sequence that has come to the end of its plan to the next one."""
        replayed = sequence.stage + 1 < len(sequence.history)
        if not replayed and (sequence.choice.growth == "reprefill" or sequence.num_computed <= self._refresh_tokens):
            self._begin_again(sequence)
            return
        if replayed and sequence.history[sequence.stage + 1].plan == sequence.plan:  # its keys are where they should be
            sequence.stage += 1
            return
        moves = self._own_pages(sequence)
        if sequence.tables:  # it did not have to give way
            old, tokens = sequence.plan, sequence.num_computed
            if replayed:
                sequence.stage += 1
            else:
                self._grow(sequence)
            sequence.num_indexed = 0
            self._preparations.append(Rerotation(sequence, old, sequence.plan, moves, tokens))

    def _grow(self, sequence: Sequence) -> None:
        """Add the next rung to a sequence's history. It begins with the latest tokens, which are computed again."""
        sequence.rung += 1
        self._promotions.append(sequence)
        sequence.num_rerotations += 1
        start = sequence.num_computed - self._refresh_tokens
        past = [segment for segment in sequence.history if segment.start < start]
        sequence.history = [*past, Segment(start, sequence.last_plan)]
        sequence.stage = len(past)
        sequence.num_computed = start

    def _begin_again(self, sequence: Sequence) -> None:
        """Compute a running sequence anew, as if it had been admitted under the next rung."""
        self._release(sequence)
        sequence.rung += 1
        self._promotions.append(sequence)
        sequence.history = [Segment(0, sequence.last_plan)]
        while not self._attach_pages(sequence, spare=0):
            if self._preempt_youngest({}) is sequence:
                return

    def _own_pages(self, sequence: Sequence) -> list[PageMove]:
        """Make sure that a sequence may write all pages with computed tokens.

        Those that others hold too are replaced, and so are those that only the index knows, for whoever begins alike;
        where there is no room for these, they leave the index.

        Returns:
            Where each page's content is and where it belongs; none if the sequence had to give way.
        """
        self._give_back(sequence)
        written = self.needs.pages_for(sequence.num_computed)
        pages = [page for table in sequence.tables for page in table.pages[: written - table.first]]
        while sum(self.pages.holders(page) > 1 for page in pages) > self.pages.num_free:
            if self._preempt_youngest({}) is sequence:
                return []
        # Room as at the start of a sequence: a page to spare for each that runs.
        spare = len(self.running) * self.needs.groups
        keep_known = sum(page in self.pages.index for page in pages) + spare <= self.pages.num_free
        moves = []
        for group, table in enumerate(sequence.tables):
            for place, source in enumerate(table.pages[: written - table.first]):
                target, known = source, source in self.pages.index
                if self.pages.holders(source) > 1 or (known and keep_known):
                    [target] = self.pages.allocate(1)
                    self.pages.release([source])
                elif known:
                    self.pages.index.forget(source)
                moves.append(PageMove(source, target, table.first + place, group))
                table.pages[place] = target
        return moves

    def _preempt_youngest(self, step: dict[Sequence, int]) -> Sequence:
        youngest = max(self.running, key=lambda s: s.arrival_time)
        step.pop(youngest, None)
        self.num_preemptions += 1
        self._requeue(youngest)
        return youngest

    def _requeue(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue, to the place that its arrival gives it."""
        self.running.remove(sequence)
        self._release(sequence)
        position = sum(1 for _ in itertools.takewhile(lambda s: s.arrival_time < sequence.arrival_time, self.waiting))
        self.waiting.insert(position, sequence)

    def _release(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            self.pages.release(table.pages)
        self._preparations = [each for each in self._preparations if each.sequence is not sequence]
        sequence.tables, sequence.draft = [], []
        sequence.num_computed = sequence.stage = sequence.num_indexed = sequence.num_private = sequence.num_placed = 0
