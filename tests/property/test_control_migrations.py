"""Requests go from worker to worker while any of them die, in any order, with late messages.

Every request ends once, as its client expects: with all of its tokens, cancelled, or refused.
Nothing is left of it anywhere, and no worker lets go of memory that another reads.
"""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupoold.domain import FinishReason, Role
from tests.unit.control.requests.migration_box import MODELS, Box, FakeWorker

WHICH = st.integers(0, 1_000)  # an index into whatever there is at that moment
ROLES = st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED, None])


class MigrationsMachine(RuleBasedStateMachine):
    @initialize(
        num_workers=st.integers(2, 3),
        roles=st.lists(ROLES, min_size=2, max_size=2),
        lengths=st.lists(st.integers(3, 9), min_size=2, max_size=4),
        stage=st.integers(0, 5),
    )
    def start(
        self, num_workers: int, roles: list[Role | None], lengths: list[int], stage: int
    ) -> None:
        """All is on the first device, which gives it away; how far that has come is ``stage``."""
        self.box = Box(num_workers)
        self.max_tokens: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.refused: set[str] = set()
        for number in range(1, num_workers):
            self.box.dispatcher.set_draining(number, is_draining=True)
        for number, length in enumerate(lengths):
            self.ask(MODELS[number % 2], length)
        self.box.exchange()
        self.step(0, is_in=False)
        for number in range(1, num_workers):
            self.box.dispatcher.set_draining(number, is_draining=False)
            self.box.dispatcher.set_role(number, roles[number - 1])
        self.box.dispatcher.set_role(0, Role.PREFILL)
        self.hear(0, 1)
        others = range(1, num_workers)
        for act in (
            lambda: self.heed(0, 9, has_kv=True),
            lambda: self.hear(0, 9),
            lambda: [self.heed(number, 9, has_kv=True) for number in others],
            lambda: [self.arrive(number, 0, is_there=True) for number in others],
            lambda: [self.hear(number, 9) for number in others],
        )[:stage]:
            act()

    @rule(model=st.sampled_from(MODELS), max_tokens=st.integers(1, 6))
    def ask(self, model: str, max_tokens: int) -> None:
        request_id = self.box.ask(max_tokens, model)
        if request_id in self.box.live:
            self.max_tokens[request_id] = max_tokens

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        if live := self.box.live:
            self.cancelled.add(live[which % len(live)])
            self.box.cancel(live[which % len(live)])

    @rule(which=WHICH, num_messages=st.integers(1, 4), has_kv=st.booleans())
    def heed(self, which: int, num_messages: int, has_kv: bool) -> None:
        worker = self.worker(which)
        for _ in range(min(num_messages, len(worker.inbox))):
            self.box.heed(worker.number, has_kv=has_kv)

    @rule(which=WHICH, num_messages=st.integers(1, 4))
    def hear(self, which: int, num_messages: int) -> None:
        worker = self.worker(which)
        for _ in range(min(num_messages, len(worker.outbox))):
            self.box.hear(worker.number)

    @rule()
    def exchange(self) -> None:
        self.box.exchange()

    @rule(which=WHICH, is_in=st.booleans())
    def step(self, which: int, is_in: bool) -> None:
        """Of both models, one turn after the other; KV that came may be on the device by then."""
        worker = self.worker(which)
        for request_id in list(worker.answers) if is_in else ():
            worker.use(request_id)
        for model in MODELS:
            worker.step(model)
        worker.end_turn()

    @rule(which=WHICH, request=WHICH, is_there=st.booleans())
    def arrive(self, which: int, request: int, is_there: bool) -> None:
        coming = list(self.worker(which).coming)
        if coming:
            self.worker(which).arrive(coming[request % len(coming)], is_there=is_there)

    @rule(which=WHICH, request=WHICH)
    def refuse(self, which: int, request: int) -> None:
        coming = list(self.worker(which).coming)
        if coming:
            self.refused.add(coming[request % len(coming)])
            self.worker(which).refuse(coming[request % len(coming)])

    @rule(which=WHICH, num_heard=st.integers(0, 5))
    def die(self, which: int, num_heard: int) -> None:
        if self.worker(which).is_ready:
            self.box.die(self.worker(which).number, num_heard)

    @rule(which=WHICH)
    def come_up(self, which: int) -> None:
        if not self.worker(which).is_ready:
            self.box.come_up(self.worker(which).number)

    @rule(which=WHICH, role=ROLES, is_draining=st.booleans())
    def change(self, which: int, role: Role | None, is_draining: bool) -> None:
        number = self.worker(which).number
        self.box.dispatcher.set_draining(number, is_draining=is_draining)
        self.box.dispatcher.set_role(number, role)

    @rule()
    def tick(self) -> None:
        self.box.tick()

    @invariant()
    def books_agree(self) -> None:
        self.box.check()

    def teardown(self) -> None:
        if not hasattr(self, "box"):
            return
        self.box.settle()
        ends = self.box.records.ends
        assert ends.keys() == self.max_tokens.keys()
        for request_id, reason in ends.items():
            assert reason in self.expected(request_id)

    def expected(self, request_id: str) -> set[FinishReason]:
        """How a request may have ended; one that is refused or cancelled may have been through."""
        reasons = {FinishReason.LENGTH}
        if request_id in self.cancelled:
            reasons.add(FinishReason.ABORT)
        if request_id in self.refused:
            reasons.add(FinishReason.ERROR)
        return reasons

    def worker(self, which: int) -> FakeWorker:
        return self.box.workers[which % len(self.box.workers)]


MigrationsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestMigrations = MigrationsMachine.TestCase
