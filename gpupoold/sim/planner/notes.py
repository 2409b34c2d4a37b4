"""Notes on a plan, as sentences: the amount of simulation, and uncertain inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpupoold.latency.shape import group_name, hardware
from gpupoold.sim.boxes import Box
from gpupoold.sim.host import LIBRARIES_BYTES, engine_costs, host_memory
from gpupoold.sim.hosting import BIND_S, EngineCosts
from gpupoold.sim.planner.models import Basis, PlannedModel, measured_on
from gpupoold.sim.planner.plan import Plan, PlanQuestion, names_text
from gpupoold.units import format_bytes, format_duration

_FEW_REQUESTS = 100


def notes_on(
    question: PlanQuestion, plan: Plan, basis: Mapping[str, Basis], models: Sequence[PlannedModel]
) -> list[str]:
    """Return the sentences, the most important first."""
    return [
        *_size(question, plan),
        *_fixed_roles(plan),
        *_step_times(question, basis, models),
        *_left_out(question, plan),
        _host_memory(question),
        *_far_switches(question),
        _engines(question, plan),
        "A token is in time if it meets its deadline, which is fixed when the request arrives: a "
        "gap above the TBT target is no miss if earlier tokens were early enough.",
    ]


def _size(question: PlanQuestion, plan: Plan) -> Iterator[str]:
    shown, load = plan.forecast, question.load
    stretch = format_duration(load.duration_s)
    num_runs = len(plan.attained.by_run)
    how = f"{num_runs} runs of {stretch} each with different draws" if num_runs > 1 else (
        f"one run of {stretch}" + ("" if load.is_random else ", as recorded")
    )  # fmt: skip
    yield (
        f"Whether the models fit was decided by {shown.num_requests:,} simulated requests: {how}. "
        f"All answers together took {plan.num_runs} runs."
    )
    if shown.num_requests < _FEW_REQUESTS:
        yield f"Fewer than {_FEW_REQUESTS} requests were simulated: the result is a rough guess."
    if shown.num_late:
        yield (
            f"Requests without a token when the runs ended: {shown.num_late:,}; all their tokens "
            "count as late, but the percentiles do not include these requests."
        )


def _fixed_roles(plan: Plan) -> Iterator[str]:
    roles = plan.fixed_roles
    if roles is None:
        return
    how = f"Fixed roles of the devices were tried {len(roles.tried)} times, each in one draw"
    if roles.best is None:
        yield f"{how}; none were better than the roles that the policy chooses."
    elif not roles.is_better:
        yield f"{how}; the best, {roles.best.text}, were not better in every draw."
    elif roles.confidence is not None:
        yield f"{how}; the draw that chose the best does not count for the confidence in them."


def _step_times(
    question: PlanQuestion, basis: Mapping[str, Basis], models: Sequence[PlannedModel]
) -> Iterator[str]:
    gpu, num_models = question.box.gpu, len(basis)
    by_basis: dict[Basis, list[str]] = {"measured": [], "published": [], "scaled": []}
    for name, kind in basis.items():
        by_basis[kind].append(name)
    yield from _own_measurements(question.box, models)
    if names := by_basis["published"]:
        yield f"Step times of {names_text(names, num_models)}: published measurements on {gpu}."
    if names := by_basis["scaled"]:
        yield (
            f"Step times of {names_text(names, num_models)}: not measured on {gpu}, but scaled "
            "from other models or GPUs; often 10 % off, at worst about 30 %."
        )
    elsewhere: dict[str, list[str]] = {}
    for model in models:
        if model.measured and basis[model.name] != "measured":
            elsewhere.setdefault(model.measured[-1].device, []).append(model.name)
    for device, names in elsewhere.items():
        named = names_text(names, num_models)
        kinds = " or ".join(group_name(degree, gpu) for degree in sorted(set(question.box.groups)))
        yield f"The daemon's measurements of {named} on {device} do not apply to {kinds}."
    if not hardware(gpu).is_pcie_measured and len(by_basis["measured"]) < num_models:
        yield f"The host link of {gpu} is taken from GPUs with the same kind of link."


def _own_measurements(box: Box, models: Sequence[PlannedModel]) -> Iterator[str]:
    """Yield the models that have step times of the daemon, for each size of group of the box."""
    for degree in sorted(set(box.groups)):
        names = [model.name for model in models if measured_on(model, box, degree) is not None]
        if names:
            named, kind = names_text(names, len(models)), group_name(degree, box.gpu)
            yield f"Step times of {named}: measured by the daemon on {kind}."


def _host_memory(question: PlanQuestion) -> str:
    host = host_memory(question.box, question.host)
    return (
        f"Host memory: {format_bytes(host.kv_bytes_per_gpu)} for the KV of each GPU and "
        f"{format_bytes(host.model_cache_bytes)} for models; larger boxes have more, smaller boxes "
        "less. Set --kv-host and --model-cache for another machine."
    )


def _far_switches(question: PlanQuestion) -> Iterator[str]:
    share = question.host.far_share
    if share is None:
        return
    largest = max(question.models.values(), key=lambda model: model.weight_bytes)
    near_s = largest.latency.switch_s(largest.weight_bytes)
    yield (
        f"Two NUMA nodes: half of the models are far from each device, copied at {100 * share:.0f} "
        f"% of the rate; a switch to {largest.name} takes {format_duration(near_s)} from the "
        f"device's own node, {format_duration(near_s / share)} from the other."
    )


def _engines(question: PlanQuestion, plan: Plan) -> str:
    engines = engine_costs(question.box, question.host)
    if engines is None:
        return "Engines are free: every device has those of all models at once."
    shown, models = plan.forecast, question.models.values()
    most = engines.most_on_device(question.models)
    size = (
        f"Engines: {_engine_sizes(engines, question.models)} of "
        f"{format_bytes(engines.limit_bytes)} on a GPU (memory.engines less "
        f"{format_bytes(LIBRARIES_BYTES)} for libraries)"
    )
    if most == len(models):
        return f"{size}: every device has those of all models."
    text = (
        f"{size}, so that a device has those of {most} model{'' if most == 1 else 's'}. A request "
        f"to another waits {format_duration(engines.load_s)} for a load ({shown.num_loads:,} in "
        "the runs)"
    )
    families = Counter(model.family for model in models if model.family)
    if max(families.values(), default=1) == 1:
        return f"{text}; fine-tunes share engines if the file of models names their family."
    return (
        f"{text}, or, where an engine of its family is idle, {format_duration(BIND_S)} to take it "
        f"over ({shown.num_bound:,} in the runs)."
    )


def _engine_sizes(engines: EngineCosts, models: Collection[str]) -> str:
    """Return the memory of engines, with that of models which have their own figure."""
    own = [num_bytes for _, num_bytes in engines.own_bytes]
    usual = f"{format_bytes(engines.num_bytes)} each"
    if not own:
        return usual
    names = names_text([name for name, _ in engines.own_bytes], len(models))
    least, most = format_bytes(min(own)), format_bytes(max(own))
    text = f"{least if least == most else f'{least} to {most}'} for {names}"
    return text if len(own) == len(models) else f"{text}, {usual} for others"


def _left_out(question: PlanQuestion, plan: Plan) -> Iterator[str]:
    shown = plan.forecast
    if shown.num_refused:
        yield (
            "Prompts too long for their model on this device: "
            f"{shown.num_refused:,}; the daemon refuses such requests, so the runs leave them out."
        )
    if shown.num_cut:
        yield f"Answers cut at the model's limit of tokens: {shown.num_cut:,}."
    if shown.num_preemptions:
        yield (
            "Requests preempted because KV outgrew a device: "
            f"{shown.num_preemptions:,} times; their KV was computed anew."
        )
    idle = [name for name in question.models if name not in shown.models]
    if idle:
        yield f"No requests, so no result, for {names_text(idle, len(question.models))}."
