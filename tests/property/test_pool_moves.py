"""Requests go from instance to instance while any of them die, in any order, with late messages.

Every request ends once, as its client expects: with all of its tokens, cancelled, or refused.
Nothing is left of it anywhere, and no instance lets go of memory that another reads.
"""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupoold.domain import FinishReason, Role
from tests.unit.pool.moves_box import MODELS, Box, FakeInstance

WHICH = st.integers(0, 1_000)  # an index into whatever there is at that moment
ROLES = st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED, None])


class MovesMachine(RuleBasedStateMachine):
    @initialize(num_instances=st.integers(2, 3), roles=st.lists(ROLES, min_size=3, max_size=3))
    def start(self, num_instances: int, roles: list[Role | None]) -> None:
        self.box = Box(num_instances)
        self.max_tokens: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.refused: set[str] = set()
        for number in range(num_instances):
            self.box.dispatcher.set_role(number, roles[number])
        self.box.exchange()

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
        instance = self.instance(which)
        for _ in range(min(num_messages, len(instance.inbox))):
            self.box.heed(instance.number, has_kv=has_kv)

    @rule(which=WHICH, num_messages=st.integers(1, 4))
    def hear(self, which: int, num_messages: int) -> None:
        instance = self.instance(which)
        for _ in range(min(num_messages, len(instance.outbox))):
            self.box.hear(instance.number)

    @rule()
    def exchange(self) -> None:
        self.box.exchange()

    @rule(which=WHICH, model=st.sampled_from(MODELS))
    def step(self, which: int, model: str) -> None:
        self.instance(which).step(model)

    @rule(which=WHICH)
    def end_turn(self, which: int) -> None:
        self.instance(which).end_turn()

    @rule(which=WHICH, request=WHICH, is_there=st.booleans())
    def arrive(self, which: int, request: int, is_there: bool) -> None:
        coming = list(self.instance(which).coming)
        if coming:
            self.instance(which).arrive(coming[request % len(coming)], is_there=is_there)

    @rule(which=WHICH, request=WHICH)
    def refuse(self, which: int, request: int) -> None:
        coming = list(self.instance(which).coming)
        if coming:
            self.refused.add(coming[request % len(coming)])
            self.instance(which).refuse(coming[request % len(coming)])

    @rule(which=WHICH, request=WHICH)
    def use(self, which: int, request: int) -> None:
        there = list(self.instance(which).answers)
        if there:
            self.instance(which).use(there[request % len(there)])

    @rule(which=WHICH, num_heard=st.integers(0, 5))
    def die(self, which: int, num_heard: int) -> None:
        if self.instance(which).is_ready:
            self.box.die(self.instance(which).number, num_heard)

    @rule(which=WHICH)
    def come_up(self, which: int) -> None:
        if not self.instance(which).is_ready:
            self.box.come_up(self.instance(which).number)

    @rule(which=WHICH, role=ROLES)
    def set_role(self, which: int, role: Role | None) -> None:
        self.box.dispatcher.set_role(self.instance(which).number, role)

    @rule(which=WHICH, is_draining=st.booleans())
    def drain(self, which: int, is_draining: bool) -> None:
        self.box.dispatcher.set_draining(self.instance(which).number, is_draining=is_draining)

    @rule()
    def tick(self) -> None:
        self.box.tick()

    @invariant()
    def books_agree(self) -> None:
        self.box.check()

    def teardown(self) -> None:
        if not hasattr(self, "box"):
            return
        try:
            self.box.settle()
            ends = self.box.records.ends
            assert ends.keys() == self.max_tokens.keys()
            for request_id, reason in ends.items():
                assert reason in self.expected(request_id)
        finally:
            self.box.close()

    def expected(self, request_id: str) -> set[FinishReason]:
        """How a request may have ended; one that is refused or cancelled may have been through."""
        reasons = {FinishReason.LENGTH}
        if request_id in self.cancelled:
            reasons.add(FinishReason.ABORT)
        if request_id in self.refused:
            reasons.add(FinishReason.ERROR)
        return reasons

    def instance(self, which: int) -> FakeInstance:
        return self.box.instances[which % len(self.box.instances)]


MovesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestMoves = MovesMachine.TestCase
