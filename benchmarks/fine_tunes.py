"""Many fine-tunes on one small card: ``make bench-family`` writes ``build/bench-family.json``.

Twenty models of one tiny architecture share an emulated device of 1.5 models, with memory for two
engines; in a second part, five families have four fine-tunes each, and memory for six engines. All
are added, asked in turn, and asked again after the worker has been killed. Each answer is compared
with vLLM alone.

In a third part two fine-tunes take turns in one engine, over a link that is as slow for their
weights as an A10's is for those of a 7B: on a card of 1.5 models the weights are copied at each
switch, on a card of 2.5 models they have stayed there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import torch
from safetensors.torch import load_file, save_file

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.families.plain import PlainVllm
from benchmarks.families.prompts import Prompt
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import module_of, processes
from benchmarks.report import Figure, at_least, at_most, finish
from gpupoold.api.schemas import EngineInfo

MAX_BIND_S = 0.1
_ARCHITECTURES = ["llama", "qwen2", "qwen3", "mixtral"]
_PROMPT = Prompt(list(range(5, 45)))
_NUM_TOKENS = 24
_ROUNDS = 3
_MAX_MODEL_LEN = 512
_TIMEOUT_S = 120.0
# A 7B in 16 bits, and an A10: bytes per second from host memory, bytes of a page, and seconds for
# mapping a page, of which an H200 needs 42 to 60 us.
_WEIGHT_BYTES, _LINK_BYTES_PER_S, _PAGE_BYTES, _MAP_S = 15.2e9, 24.5e9, 8 << 20, 60e-6
_CARDS = {"copied": 1.5, "resident": 2.5}
_PROCESSES = {
    "gpupoold": "daemon",
    "gpupoold.worker": "worker",
    "gpupoold.frontend": "frontend",
}


class Asked(NamedTuple):
    """An answer of a model, and the time until it was complete."""

    model: str
    token_ids: list[int]
    took_s: float


def main() -> int:
    """Run both parts; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.fine_tunes")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--model-bytes", type=int, default=20_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/bench-family.json"))
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    parts: dict[str, Any] = {}
    for num_families in (1, 5):
        with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as name:
            folder = Path(name)
            bases = make_checkpoints(folder, ["llama"], arguments.model_bytes)
            if num_families > 1:
                small_bytes = arguments.model_bytes * 3 // 4
                bases += make_checkpoints(folder / "small", _ARCHITECTURES, small_bytes)
            names = {
                f"family-{index}-{number}": base
                for number in range(arguments.models // num_families)
                for index, base in enumerate(bases)
            }
            paths = {
                name: fine_tune(base, folder / name, seed)
                for seed, (name, base) in enumerate(names.items())
            }
            part = run(paths, folder, num_families + 1)
        of = f"{num_families}_{'family' if num_families == 1 else 'families'}"
        figures |= {f"{of}_{key}": figure for key, figure in make_figures(part)}
        parts[of] = part
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as name:
        folder = Path(name)
        [base] = make_checkpoints(folder, ["llama"], arguments.model_bytes)
        paths = {name: fine_tune(base, folder / name, seed) for seed, name in enumerate("ab")}
        parts["switching"] = switching(paths, folder)
    figures |= dict(switching_figures(parts["switching"]))
    return finish(arguments.out, figures, **parts)


def fine_tune(base: Path, target: Path, seed: int) -> Path:
    """Copy a checkpoint, with other weights of the same shapes."""
    shutil.copytree(base, target)
    generator = torch.Generator().manual_seed(seed)
    for file in target.glob("*.safetensors"):
        weights = load_file(file)
        for tensor in weights.values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                limit = torch.finfo(tensor.dtype).max  # torch makes NaN of larger numbers in fp8
                tensor.copy_((tensor.float() * (1 + 0.2 * noise)).clamp(-limit, limit))
        save_file(weights, file, metadata={"format": "pt"})
    return target


def run(paths: Mapping[str, Path], folder: Path, num_engines: int) -> dict[str, Any]:
    """Return what was measured with models on one device of 1.5 of the largest.

    The device has the memory that the first ``num_engines`` engines have taken.
    """
    expected = dict(_alone(paths, folder / "plain.log"))
    largest_bytes = max(map(weight_bytes, paths.values()))
    config = emulated_config(int(1.5 * largest_bytes))
    with private_daemon(config, folder / "box", server="frontends = 1") as daemon:
        added_s: list[float] = []
        loaded_s: list[float] = []
        used_bytes: list[dict[str, int]] = []
        for number, (name, path) in enumerate(paths.items()):
            began_s = time.monotonic()
            daemon.add_model(name, path, dtype="float32", max_model_len=_MAX_MODEL_LEN)
            added_s.append(time.monotonic() - began_s)
            loaded_s.append(_loaded_s(daemon, name))
            used_bytes.append(_used_bytes(daemon))
            if number == num_engines - 1:
                limit_engines(daemon)
        asked = [[_ask(daemon, name) for name in paths] for _ in range(_ROUNDS)]
        loads_s = _loads_s(daemon)
        back_s, first_s = _kill(daemon, next(iter(paths)))
        asked.append([_ask(daemon, name) for name in paths])
        with daemon.client() as client:
            states = {model.state for model in client.models()}
            events = [event for event in client.events() if event.kind == "engine_evicted"]
    assert states == {"ready"}, states
    answers = [one for round_ in asked for one in round_]
    return {
        "num_models": len(paths),
        "num_answers": len(answers),
        "num_differing": sum(one.token_ids != expected[one.model] for one in answers),
        "num_taken_over": sum("was given to" in event.message for event in events),
        "answer_p50_s": [median(one.took_s for one in round_) for round_ in asked],
        "load_p50_s": loads_s,
        "added_s": added_s,
        "addition_p50_s": {
            "with_engine": median(loaded_s[1:num_engines]),
            "without_engine": median(loaded_s[num_engines:]),
        },
        "back_s": back_s,
        "first_answer_s": first_s,
        "bytes_per_model": {
            kind: (num_bytes - used_bytes[num_engines - 1][kind]) / max(1, len(paths) - num_engines)
            for kind, num_bytes in used_bytes[-1].items()
        },
    }


def switching(paths: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Return what was measured of fine-tunes that take turns in one engine, by size of the card."""
    expected = dict(_alone(paths, folder / "plain.log"))
    num_bytes = max(map(weight_bytes, paths.values()))
    link = f"{int(num_bytes * _LINK_BYTES_PER_S / _WEIGHT_BYTES)}B/s"
    measured: dict[str, Any] = {}
    for name, share in _CARDS.items():
        config = emulated_config(int(share * num_bytes), link=link)
        with private_daemon(config, folder / name, server="frontends = 1") as daemon:
            for number, (model, path) in enumerate(paths.items()):
                daemon.add_model(model, path, dtype="float32", max_model_len=_MAX_MODEL_LEN)
                if not number:
                    limit_engines(daemon)
            asked, engines = list[Asked](), list[EngineInfo]()
            for model in [*paths] * (_ROUNDS + 1):
                asked.append(_ask(daemon, model))
                with daemon.client() as client:
                    engines += [one for usage in client.ps().models for one in usage.engines]
        del engines[: len(paths)]  # of the first answers
        measured[name] = {
            "num_differing": sum(one.token_ids != expected[one.model] for one in asked),
            "answer_s": [one.took_s for one in asked],
            "load_s": [engine.load.total_s for engine in engines],
            "bind_s": [engine.load.total_s - engine.load.check_s for engine in engines],
            "resident_bytes": [engine.resident_bytes for engine in engines],
        }
    return measured | {"weight_bytes": num_bytes, "link": link}


def switching_figures(part: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of switches between fine-tunes, and for a 7B on an A10 by its costs."""
    copied, resident = part["copied"], part["resident"]
    num_differing = copied["num_differing"] + resident["num_differing"]
    yield "switching_answers_that_differ", at_most(num_differing, 0)
    least_bytes = min(resident["resident_bytes"])
    yield "switching_resident_bytes", at_least(least_bytes, part["weight_bytes"])
    copied_s = median(copied["load_s"])
    yield "switching_copied_load_p50_s", at_most(copied_s, float("inf"))
    yield "switching_resident_load_p50_s", at_most(median(resident["load_s"]), copied_s / 2)
    for name in _CARDS:
        answer_s = median(part[name]["answer_s"][len(part[name]["answer_s"]) // 2 :])
        yield f"switching_{name}_answer_p50_s", at_most(answer_s, float("inf"))
    moves_s = {
        "copied": _WEIGHT_BYTES / _LINK_BYTES_PER_S,
        "resident": _WEIGHT_BYTES / _PAGE_BYTES * _MAP_S,
    }
    for name, move_s in moves_s.items():
        bind_s = min(part["resident"]["bind_s"]) + move_s
        yield f"modelled_7b_a10_{name}_s", at_most(bind_s, float("inf"))


def make_figures(part: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of a part by name, each beside its limit."""
    yield "answers_that_differ", at_most(part["num_differing"], 0)
    yield "bind_p50_s", at_most(part["load_p50_s"]["bind"], MAX_BIND_S)
    for how, took_s in part["addition_p50_s"].items():
        yield f"addition_{how}_p50_s", at_most(took_s, float("inf"))
    yield "answer_p50_s", at_most(part["answer_p50_s"][-2], float("inf"))
    # All models are served again when the device is: the time of one load, not of twenty.
    yield "back_after_kill_s", at_most(part["back_s"], float("inf"))
    for kind, num_bytes in part["bytes_per_model"].items():
        yield f"{kind}_per_model_bytes", at_most(num_bytes, float("inf"))


def _alone(paths: Mapping[str, Path], log: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the answers of vLLM without gpupool."""
    with PlainVllm(log) as plain:
        for name, path in paths.items():
            plain.load(name, path, "float32", max_model_len=_MAX_MODEL_LEN)
            yield name, plain.answer(name, _PROMPT, _NUM_TOKENS)


def limit_engines(daemon: PrivateDaemon) -> None:
    """Allow no more memory for the engines of a device than the present ones take."""
    with daemon.client() as client:
        engine_bytes = max(device.engine_bytes for device in client.ps().devices)
        file = daemon.log_path.parent / "gpupool.toml"
        file.write_text(f"{file.read_text()}\n[memory]\nengines = {engine_bytes + 1}\n")
        client.reload()


def _ask(daemon: PrivateDaemon, model: str) -> Asked:
    body = {
        "model": model,
        "prompt": _PROMPT.token_ids,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    began_s = time.monotonic()
    answer = httpx.post(f"{daemon.http_url}/v1/completions", json=body, timeout=_TIMEOUT_S)
    took_s = time.monotonic() - began_s
    assert answer.status_code == 200, answer.text
    return Asked(model, answer.json()["choices"][0]["token_ids"], took_s)


def _loaded_s(daemon: PrivateDaemon, name: str) -> float:
    """Return the seconds of a new model's load, beside reading, self-check and profiling."""
    with daemon.client() as client:
        [load] = [
            engine.load
            for model in client.ps().models
            for engine in model.engines
            if model.name == name
        ]
    return load.total_s - load.read_s - load.check_s - load.profile_s


def _loads_s(daemon: PrivateDaemon) -> dict[str, float]:
    """Return seconds of the present engines' loads: without the self-check, and of it."""
    with daemon.client() as client:
        loads = [engine.load for model in client.ps().models for engine in model.engines]
    return {
        "bind": median(load.total_s - load.check_s for load in loads),
        "check": median(load.check_s for load in loads),
    }


def _kill(daemon: PrivateDaemon, model: str) -> tuple[float, float]:
    """Kill the worker; return the times until all models are ready, and until an answer."""
    with daemon.client() as client:
        [device] = client.ps().devices
        killed_s = time.monotonic()
        assert device.pid
        os.kill(device.pid, signal.SIGKILL)
        while True:
            now = client.ps()
            is_back = now.devices[0].state == "ready" and now.devices[0].pid != device.pid
            if is_back and {model.state for model in now.models} == {"ready"}:
                break
            time.sleep(0.005)
    back_s = time.monotonic() - killed_s
    _ask(daemon, model)
    return back_s, time.monotonic() - killed_s


def _used_bytes(daemon: PrivateDaemon) -> dict[str, int]:
    """Return the private memory of the daemon's processes, and the device's beside its pages."""
    found = dict.fromkeys(_PROCESSES.values(), 0)
    for process in processes(daemon):
        if (kind := _PROCESSES.get(module_of(process) or "")) is not None:
            found[kind] += process.memory_full_info().uss
    with daemon.client() as client:
        [device] = client.ps().devices
    return found | {"device": device.engine_bytes}


if __name__ == "__main__":
    sys.exit(main())
