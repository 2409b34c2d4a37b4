"""The turn scheduler under any traffic: fair, bounded, never stuck, quotas always sane.

The machine plays an instance on a virtual clock: it takes turns, switches, steps
until the scheduler says that the turn is over, while requests come, gain tokens,
end, are cancelled, and models come, change and go.
"""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupoold.domain import Targets
from gpupoold.scheduling.turns import SwitchCost, Turn, TurnScheduler

WHICH = st.integers(0, 1_000)
TARGETS = st.builds(Targets, st.floats(0.05, 60), st.floats(0.001, 10))
SECONDS = st.floats(0, 5)


class TurnMachine(RuleBasedStateMachine):
    @initialize(quota_max_s=st.floats(0.01, 10))
    def start(self, quota_max_s: float) -> None:
        self.quota_max_s = quota_max_s
        self.scheduler = TurnScheduler(quota_max_s)
        self.now_s = 1_000.0
        self.num_named = 0
        self.live: dict[str, dict[str, int]] = {}
        self.switch_s: dict[str, float] = {}
        self.longest_step_s: dict[str, float] = {}
        self.turn: Turn | None = None
        self.waited: dict[str, int] = {}  # turns of others since a model began to wait
        for number in range(3):
            self.add_model(Targets(), switch_s=0.5 * number)
            self.arrive(number, count=2, ago_s=0.0)

    @rule(promised=TARGETS, switch_s=SECONDS)
    def add_model(self, promised: Targets, switch_s: float) -> None:
        if len(self.live) == 6:
            return
        self.num_named += 1
        model = f"m{self.num_named}"
        self.scheduler.add_model(model, promised)
        self.live[model], self.switch_s[model] = {}, switch_s
        self.longest_step_s[model] = 0.02

    @rule(which=WHICH)
    def remove_model(self, which: int) -> None:
        if not self.live:
            return
        model = self.pick(which)
        self.scheduler.remove_model(model)
        for table in (self.live, self.switch_s, self.waited):
            table.pop(model, None)  # type: ignore[attr-defined]
        if self.turn is not None and self.turn.model == model:
            assert self.scheduler.turn_is_over(self.turn, self.now_s)
            self.turn = None

    @rule(which=WHICH, promised=TARGETS)
    def change_targets(self, which: int, promised: Targets) -> None:
        if self.live:
            self.scheduler.set_targets(self.pick(which), promised)

    @rule(which=WHICH, count=st.integers(1, 4), ago_s=SECONDS)
    def arrive(self, which: int, count: int, ago_s: float) -> None:
        if not self.live:
            return
        model = self.pick(which)
        if not self.live[model]:
            self.waited[model] = 0
        for _ in range(count):
            self.num_named += 1
            self.scheduler.arrive(model, f"r{self.num_named}", self.now_s - ago_s)
            self.live[model][f"r{self.num_named}"] = 0

    @rule(which=WHICH, request=WHICH)
    def cancel(self, which: int, request: int) -> None:
        if not self.live or not self.live[self.pick(which)]:
            self.scheduler_ignores_the_unknown(which)
            return
        model = self.pick(which)
        request_id = sorted(self.live[model])[request % len(self.live[model])]
        del self.live[model][request_id]
        self.scheduler.finish(model, request_id)
        self.scheduler.finish(model, request_id)

    @rule(num_turns=st.integers(1, 8), step_s=st.floats(0, 1), lifetime=st.integers(1, 30))
    def run(self, num_turns: int, step_s: float, lifetime: int) -> None:
        """Turns as the instance takes them; requests end after ``lifetime`` tokens."""
        for _ in range(num_turns):
            working = self.working()
            turn = self.scheduler.next_turn(self.now_s, self.cost())
            self.turn = turn
            if not working:
                assert turn is None
                return
            assert turn is not None
            self.check(turn, working)
            self.now_s += self.switch_s[turn.model]
            self.step_through(turn, step_s, lifetime)
            self.turn = None

    @rule(num_steps=st.integers(1, 5), step_s=st.floats(0, 1))
    def run_a_part_of_a_turn(self, num_steps: int, step_s: float) -> None:
        """Then other rules happen in the middle of it."""
        if self.turn is None:
            working = self.working()
            self.turn = self.scheduler.next_turn(self.now_s, self.cost())
            if self.turn is None:
                return
            self.check(self.turn, working)
        for _ in range(num_steps):
            if self.scheduler.turn_is_over(self.turn, self.now_s):
                self.turn = None
                return
            self.step(self.turn.model, step_s, lifetime=1000)

    @invariant()
    def counts_agree(self) -> None:
        scheduler = self.scheduler
        assert sorted(scheduler.working_models()) == sorted(self.working())
        assert scheduler.has_work() == bool(self.working())
        for model, requests in self.live.items():
            assert scheduler.num_live(model) == len(requests)
            assert sorted(scheduler.live_requests(model)) == sorted(requests)
            assert scheduler.num_waiting(model) == list(requests.values()).count(0)
            assert math.isinf(scheduler.next_deadline_s(model)) == (not requests)

    def teardown(self) -> None:
        """With all requests ending, the scheduler comes to rest, model by model."""
        if not hasattr(self, "scheduler"):
            return
        limit = len(self.working())
        for _ in range(limit):
            turn = self.scheduler.next_turn(self.now_s, self.cost())
            assert turn is not None
            for request_id in list(self.live[turn.model]):
                self.scheduler.finish(turn.model, request_id)
            self.live[turn.model].clear()
        assert self.scheduler.next_turn(self.now_s, self.cost()) is None

    def check(self, turn: Turn, working: list[str]) -> None:
        assert turn.model in working
        # Never longer than allowed, unless a single step is, or a lone model's own pace.
        longest_s = max(self.quota_max_s, 2 * self.longest_step_s[turn.model])
        assert 0 < turn.quota_s <= longest_s * (1 + 1e-9)
        expected_s = self.now_s + self.switch_s[turn.model] + turn.quota_s
        assert math.isclose(turn.ends_at_s, expected_s)
        for model in working:
            self.waited[model] = 0 if model == turn.model else self.waited.get(model, 0) + 1
            # At worst it missed a round by a moment: the rest of that one, then one more.
            assert self.waited[model] <= 2 * 6

    def step_through(self, turn: Turn, step_s: float, lifetime: int) -> None:
        started_s = self.now_s
        for _ in range(10_000):
            self.step(turn.model, max(step_s, turn.quota_s / 100), lifetime)
            if self.scheduler.turn_is_over(turn, self.now_s):
                break
        else:
            raise AssertionError(f"{turn} has no end")
        if self.live[turn.model]:  # then it was its quota, and others wait
            assert len(self.working()) > 1
            slack_s = self.longest_step_s[turn.model] + 1e-6
            assert self.now_s - started_s <= turn.quota_s + slack_s

    def step(self, model: str, step_s: float, lifetime: int) -> None:
        self.now_s += step_s
        self.scheduler.observe_step(model, step_s)
        self.longest_step_s[model] = max(self.longest_step_s[model], step_s)
        for request_id in list(self.live[model]):
            self.scheduler.progress(model, request_id, 1)
            self.live[model][request_id] += 1
            if self.live[model][request_id] >= lifetime:
                self.scheduler.finish(model, request_id)
                del self.live[model][request_id]

    def scheduler_ignores_the_unknown(self, which: int) -> None:
        if self.live:
            self.scheduler.finish(self.pick(which), "unknown")
            self.scheduler.progress(self.pick(which), "unknown", 1)

    def working(self) -> list[str]:
        return [model for model, requests in self.live.items() if requests]

    def cost(self) -> SwitchCost:
        missing = {model: self.switch_s[model] for model in self.working()}
        all_fit = self.num_named % 2 == 0
        full = {model: seconds + 0.01 for model, seconds in missing.items()}
        return SwitchCost(missing, full, all_fit)

    def pick(self, which: int) -> str:
        return sorted(self.live)[which % len(self.live)]


TurnMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTurnMachine = TurnMachine.TestCase
