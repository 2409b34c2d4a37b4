"""The output of ``gpupool plan``: answers as text, or a JSON document."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.progress import SpinnerColumn, TimeElapsedColumn

from gpupool_cli.output import NOTHING, columns, duration_text, print_line, print_table
from gpupool_cli.progress import BarView, description_column
from gpupoold.sim.boxes import Box, groups_text
from gpupoold.sim.metrics import Summary
from gpupoold.sim.planner.groups import GroupChoice, GroupingTried
from gpupoold.sim.planner.models import Basis, PlannedModel
from gpupoold.sim.planner.notes import notes_on
from gpupoold.sim.planner.plan import (
    MAX_DEVICES,
    Plan,
    PlanQuestion,
    PolicyResult,
    Tried,
    models_below,
    names_text,
)
from gpupoold.sim.planner.run import Attained, FixedRoles, RolesTried
from gpupoold.units import format_duration

_MAX_ROWS = 20
_MAX_NAMED = 3
_MAX_NOT_ENOUGH = 3
_COLUMNS = columns(
    "MODEL, REQUESTS>, SLO%>, TTFT-p50>, TTFT-p99>, TARGET>, TBT-p50>, TBT-p99>, TARGET>, "
    "STEP TIMES"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the data for its report; ``choice`` is that of the groups, None without one."""

    question: PlanQuestion
    plan: Plan
    basis: Mapping[str, Basis]
    models: Sequence[PlannedModel]
    notes: Sequence[str]
    wall_s: float
    choice: GroupChoice | None = None

    def all_notes(self) -> list[str]:
        """Return notes on the inputs, then notes on the answers."""
        return [*self.notes, *notes_on(self.question, self.plan, self.basis, self.models)]


class PlanProgress(BarView):
    """The progress of the simulations, on stderr of a terminal; use as a context manager."""

    def __init__(self) -> None:
        super().__init__(SpinnerColumn(), description_column(), TimeElapsedColumn())
        if self._bar is not None:
            self._task = self._bar.add_task("simulating", total=None)

    def show(self, what: str, num_runs: int) -> None:
        """Show that ``num_runs`` runs are done and that ``what`` comes next."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"run {num_runs + 1}: {what}")


def plan_document(planned: Planned) -> dict[str, object]:
    """Return the answers as a JSON object; docs/planning.md explains some of the keys."""
    question, plan = planned.question, planned.plan
    shown, box, best = plan.forecast, question.box, plan.policies[0]
    return {
        "devices": box.name,
        "num_devices": box.num_devices,
        "groups": groups_text(box.groups),
        "groupings": group_document(planned.choice, question.target) if planned.choice else [],
        "load": question.load.text,
        "duration_s": question.load.duration_s,
        "target": question.target,
        "fits": plan.fits,
        **_attained_document(plan.attained),
        "requests": shown.num_requests,
        "devices_needed": plan.needed,
        "gpus_needed": None if plan.needed is None else _num_gpus(box, plan.needed),
        "confidence": _confidence(plan, question.target),
        "devices_tried": [_tried_document(count, question.target) for count in plan.counts],
        "policy": best.policy,
        "num_prefill": best.num_prefill,
        "policies": [
            {"policy": policy.policy, "num_prefill": policy.num_prefill}
            | _attained_document(policy.attained)
            | ({"refused": policy.attained.refused} if policy.attained.refused else {})
            for policy in plan.policies
        ],
        **roles_document(plan.fixed_roles),
        "models": [
            _model_document(planned, name, summary) for name, summary in _worst_first(planned)
        ],
        "growth": plan.growth,
        "growth_limit": plan.growth_limit,
        "changes": [_tried_document(change, question.target) for change in plan.changes],
        "requests_refused": shown.num_refused,
        "requests_cut": shown.num_cut,
        "requests_never_begun": shown.num_late,
        "notes": planned.all_notes(),
        "num_runs": plan.num_runs,
        "wall_s": round(planned.wall_s, 3),
    }


def _confidence(plan: Plan, target: float) -> float | None:
    """Return the confidence in the needed number of devices; None without a number or draws."""
    needed = [count.attained for count in plan.counts if count.num_devices == plan.needed]
    return needed[0].confidence(target) if needed else None


def print_plan(planned: Planned) -> None:
    """Print the answers in the order of the questions."""
    question = planned.question
    writer = _Writer(question.target)
    box, num_models = question.box, len(question.models)
    groups = f" as {groups_text(box.groups)}" if box.tensor_parallel_size > 1 else ""
    writer.paragraph(f"{box.name}{groups}, {_count(num_models, 'model')}, {question.load.text}")
    if planned.choice is not None:
        writer.section("Which groups?", list(group_lines(planned.choice, writer.attained)))
    writer.section("Does it fit?", writer.fit_lines(planned))
    writer.section(f"How many {box.gpu}?", writer.device_lines(planned))
    if len(planned.plan.policies) > 1:
        lines = [writer.policy_line(policy, box.num_devices) for policy in planned.plan.policies]
        writer.section("Which policy?", lines)
    if lines := roles_lines(planned.plan.fixed_roles, writer.attained, writer.percent):
        writer.section("Which roles?", lines)
    writer.section("What will users see?", ())
    _print_models(planned, writer)
    writer.section("What to change first?", writer.change_lines(planned))
    writer.section("How sure is this?", planned.all_notes())


class _Writer:
    """Lines of the report. Shares are rounded down: a missed target must not look reached."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._decimals = max(1, len(f"{100 * target:.6f}".rstrip("0").partition(".")[2]))
        tty = sys.stdout.isatty()
        self._width = shutil.get_terminal_size().columns if tty else None

    def percent(self, share: float | None) -> str:
        return "nothing" if share is None else f"{self.number(share)} %"

    def number(self, share: float | None) -> str:
        """Return a percentage without the sign."""
        if share is None:
            return NOTHING
        return f"{self._floored(share):g}"

    def cell(self, share: float | None) -> str:
        """Return a percentage without the sign, with all decimals, for a column of a table."""
        return NOTHING if share is None else f"{self._floored(share):.{self._decimals}f}"

    def _floored(self, share: float) -> float:
        scale = 10.0**self._decimals
        return math.floor(100 * share * scale + 1e-6) / scale

    def attained(self, attained: Attained, after: str = "") -> str:
        """Return a share and the range of several runs, or the reason why no run was possible.

        ``after`` is inserted between share and range.
        """
        if attained.refused:
            return attained.refused
        bounds = [bound(attained.by_run, default=None) for bound in (min, max)]
        low, high = map(self.number, bounds)
        spread = f" ({low} to {high})" if low != high else ""
        return self.percent(attained.overall) + after + spread

    def section(self, title: str, lines: Iterator[str] | Sequence[str]) -> None:
        """Print a title and lines."""
        print_line("")
        print_line(title)
        for line in lines:
            self.paragraph(line, "  ")

    def paragraph(self, text: str, indent: str = "") -> None:
        """Print a paragraph, wrapped on a terminal, else as one line."""
        if self._width is None:
            print_line(indent + text)
            return
        more = indent + ("  " if indent else "")
        wrapped = textwrap.wrap(
            text, self._width, initial_indent=indent, subsequent_indent=more,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        for line in wrapped:
            print_line(line)

    def fit_lines(self, planned: Planned) -> Iterator[str]:
        """Yield attainment against target, and the worst models."""
        plan = planned.plan
        wanted = self.percent(self._target)
        num_runs = len(plan.attained.by_run)
        yield (
            f"{'Yes' if plan.fits else 'No'}: "
            f"{self.attained(plan.attained, ' of the tokens come in time')}; "
            f"wanted {'are' if num_runs < 2 else f'in each of {num_runs} runs are'} {wanted}."
        )
        below = models_below(plan.forecast, self._target)
        if not below:
            yield f"Every single model has at least {wanted}."
            return
        shares = [
            f"{name} {self.percent(plan.forecast.models[name].attainment)}"
            for name in below[:_MAX_NAMED]
        ]
        more = ", ..." if len(below) > _MAX_NAMED else ""
        of = f"{len(below)} of {_count(len(plan.forecast.models), 'model')}"
        yield f"{of} {'is' if len(below) == 1 else 'are'} below {wanted}: {', '.join(shares)}{more}"

    def device_lines(self, planned: Planned) -> Iterator[str]:
        """Yield the needed number of devices, and the results of that number and of fewer."""
        question, plan = planned.question, planned.plan
        now = question.box.num_devices
        by_count = {count.num_devices: count for count in plan.counts}
        if plan.needed is None:
            most = plan.counts[-1]
            best = max(plan.counts, key=lambda trial: trial.attained.worst)
            at_most = f"with up to {most.text} at most {self.attained(best.attained)} is reached"
            yield (
                f"Not known: {at_most}, and more than {MAX_DEVICES} devices are not tried."
                if most.num_devices >= MAX_DEVICES
                else f"More devices do not help enough: {at_most}. The devices are too slow."
            )
            return
        needed = by_count[plan.needed]
        num_gpus = _num_gpus(question.box, plan.needed)
        verb = "is" if num_gpus == 1 else "are"
        enough = "" if plan.needed != now else ", as many as the box has"
        yield (
            f"{num_gpus} {verb} needed{enough}: {needed.text} gives "
            f"{self.attained(needed.attained)}."
        )
        if (sure := needed.attained.confidence(self._target)) is not None:
            yield (
                "One-sided confidence that most such periods reach the target: "
                f"{self.percent(sure)}; --runs draws more."
            )
        fewer = [count for count in plan.counts if count.num_devices < plan.needed]
        if fewer:
            is_single = question.box.tensor_parallel_size == 1
            fewer_text = "One fewer" if is_single else "One group fewer"
            yield f"{fewer_text} is not enough: {self.attained(fewer[-1].attained)}."

    def policy_line(self, result: PolicyResult, num_devices: int) -> str:
        """Return a policy's attainment and best split into prefill and decode devices."""
        if refused := result.attained.refused:
            return f"{result.policy}: {refused.removeprefix(f'{result.policy} ')}"
        split = ""
        if result.num_prefill is not None:
            num_decode = num_devices - result.num_prefill
            split = f", best with {result.num_prefill} to prefill and {num_decode} to decode"
        return f"{result.policy}: {self.attained(result.attained)}{split}"

    def change_lines(self, planned: Planned) -> Iterator[str]:
        """Yield sufficient changes, cheapest first; if the load fits, how much it may grow."""
        plan = planned.plan
        if plan.growth is not None:
            yield f"No change is needed. {_growth_text(plan.growth, plan.growth_limit)}"
            return
        enough = [change for change in plan.changes if change.attained.reaches(self._target)]
        short = [change for change in plan.changes if not change.attained.reaches(self._target)]
        if enough:
            yield "Each of these changes was simulated and is enough alone, the cheapest first:"
            for number, trial in enumerate(enough, start=1):
                yield f"{number}. {trial.text}: {self.attained(trial.attained)}"
        best: dict[str, Tried] = {}
        for trial in sorted(short, key=lambda trial: -trial.attained.worst):
            if trial.kind not in {other.kind for other in enough}:
                best.setdefault(trial.kind, trial)
        if best:
            yield "Not enough alone:" if enough else "No single change is enough. The best:"
            for trial in list(best.values())[:_MAX_NOT_ENOUGH]:
                yield f"- {trial.text}: {self.attained(trial.attained)}"


def _print_models(planned: Planned, writer: _Writer) -> None:
    rows = [
        (
            name,
            str(summary.num_requests),
            writer.cell(summary.attainment),
            duration_text(summary.ttft_s.p50),
            duration_text(summary.ttft_s.p99),
            format_duration(planned.question.models[name].targets.ttft_s),
            duration_text(summary.tbt_s.p50),
            duration_text(summary.tbt_s.p99),
            format_duration(planned.question.models[name].targets.tbt_s),
            planned.basis[name],
        )
        for name, summary in _worst_first(planned)
    ]
    print_table(_COLUMNS, rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        writer.paragraph(f"and {len(rows) - _MAX_ROWS} models that do better (--json has all)")


def _worst_first(planned: Planned) -> list[tuple[str, Summary]]:
    summaries = planned.plan.forecast.models
    return sorted(
        summaries.items(),
        key=lambda item: (1.0 if item[1].attainment is None else item[1].attainment, item[0]),
    )


def _model_document(planned: Planned, name: str, summary: Summary) -> dict[str, object]:
    model = planned.question.models[name]
    return {
        "name": name,
        "requests": summary.num_requests,
        "finished": summary.num_finished,
        "attainment": summary.attainment,
        "ttft_p50_s": summary.ttft_s.p50,
        "ttft_p99_s": summary.ttft_s.p99,
        "ttft_s": model.targets.ttft_s,
        "tbt_p50_s": summary.tbt_s.p50,
        "tbt_p99_s": summary.tbt_s.p99,
        "tbt_s": model.targets.tbt_s,
        "weight_bytes": model.weight_bytes,
        "step_times": planned.basis[name],
        "step_times_source": model.latency.source,
    }


def _tried_document(tried: Tried, target: float) -> dict[str, object]:
    return {
        "kind": tried.kind,
        "text": tried.text,
        "num_devices": tried.num_devices,
        **_attained_document(tried.attained),
        "reaches": tried.attained.reaches(target),
    }


def _attained_document(attained: Attained) -> dict[str, object]:
    return {"attainment": attained.overall, "attainment_by_run": list(attained.by_run)}


def _growth_text(growth: float, limit: float | None) -> str:
    if limit is None:
        return f"Even {growth:g} times this load fits."
    if growth == 1:
        return f"But {limit:g} times this load would not fit."
    return f"The load may grow to {growth:g} times the present; {limit:g} times is too much."


def _num_gpus(box: Box, num_devices: int) -> int:
    return sum(replace(box, num_devices=num_devices).groups)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def group_lines(choice: GroupChoice, attained: Callable[[Attained], str]) -> Iterator[str]:
    """Yield the chosen groups, then the others, and single GPUs if these cannot run all models.

    ``attained`` returns a share as text.
    """
    best, *others = choice.tried
    yield f"{best.text} carries the most: {_result(best, attained)}."
    for other in others:
        yield f"- {other.text}: {_result(other, attained)}"
    yield from _size_lines(choice.best_degrees)


def group_document(choice: GroupChoice, target: float) -> list[dict[str, object]]:
    """Return the groupings as JSON, the best first."""
    return [
        {
            "groups": grouping.text,
            "attainment": grouping.attained.overall if grouping.attained else None,
            "reaches": grouping.attained is not None and grouping.attained.reaches(target),
            "growth": grouping.growth,
            "refused": grouping.refused,
        }
        for grouping in choice.tried
    ]


def _result(grouping: GroupingTried, attained: Callable[[Attained], str]) -> str:
    if grouping.attained is None:
        return f"not possible: {grouping.refused}"
    share = f"{attained(grouping.attained)} of the tokens in time"
    if not grouping.growth:
        return f"{share}, too few"
    return f"{share}; {grouping.growth:g} times the load fits" if grouping.growth > 1 else share


def _size_lines(best_degrees: Mapping[str, int]) -> Iterator[str]:
    """Yield the group sizes of equation 6, which looks at each model alone."""
    by_degree: dict[int, list[str]] = defaultdict(list)
    for name, degree in best_degrees.items():
        by_degree[degree].append(name)
    parts = [
        f"{degree} for {names_text(names, len(best_degrees))}"
        for degree, names in sorted(by_degree.items())
    ]
    yield f"GPUs with which a model alone makes the most tokens per GPU: {', '.join(parts)}."


def roles_lines(
    roles: FixedRoles | None,
    attained: Callable[[Attained], str],
    percent: Callable[[float | None], str],
) -> list[str]:
    """Return fixed roles that are better than the policy's own, empty without such roles.

    ``attained`` and ``percent`` return shares as text.
    """
    if roles is None or roles.best is None or roles.gain is None or not roles.is_better:
        return []
    lines = [
        f"Fixed roles are better: {roles.best.text} gives {attained(roles.best.attained)} of the "
        f"tokens in time, {100 * roles.gain:.2g} points more than the roles that the policy "
        "chooses."
    ]
    if roles.confidence is not None:
        lines.append(
            "One-sided confidence that they are better in most such periods: "
            f"{percent(roles.confidence)}; --runs draws more."
        )
    return lines


def roles_document(roles: FixedRoles | None) -> dict[str, object]:
    """Return the best fixed roles and all tried roles as JSON keys."""
    best = None
    if roles is not None and roles.best is not None:
        best = _tried_roles_document(roles.best) | {
            "gain": roles.gain,
            "is_better": roles.is_better,
            "confidence": roles.confidence,
        }
    tried = () if roles is None else roles.tried
    return {
        "fixed_roles": best,
        "fixed_roles_tried": [_tried_roles_document(trial) for trial in tried],
    }


def _tried_roles_document(tried: RolesTried) -> dict[str, object]:
    return {
        "roles": tried.text,
        "num_prefill": tried.num_prefill,
        "attainment": tried.attained.overall,
        "attainment_by_run": list(tried.attained.by_run),
    }
