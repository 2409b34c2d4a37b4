"""Fine-tunes of each family share engines on two devices, with the tokens of vLLM alone.

A random schedule asks both, offloads and migrates answers, gives an engine to the other model,
removes a model and adds it again, and kills workers.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGKILL

import httpx
import psutil
import pytest

from benchmarks.bench.rig import emulated_config
from benchmarks.families.checks import GroupCheck
from benchmarks.families.family import Family
from benchmarks.families.make import make_family
from benchmarks.families.plain import PlainVllm
from benchmarks.families.prompts import LONG, SIZES, prompt_of
from benchmarks.families.table import FAMILIES, family_named
from benchmarks.families.workers import FamilyWorker
from benchmarks.fine_tunes import fine_tune, limit_engines
from benchmarks.private_daemon import private_daemon
from gpupoold.errors import Refused
from gpupoold.scheduling import events as e
from gpupoold.wire import messages as m
from tests.conftest import ROOT
from tests.functional.daemon_tools import weight_bytes
from tests.functional.test_families import skip_without_kernel
from tests.functional.worker_peer import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ACTIONS = 24
MIN_TOKENS, MAX_TOKENS = 1, 40
"""Of an answer when an action begins, far fewer than a long answer has."""
KV_BYTES = 8 << 20


@dataclass(frozen=True)
class Answer:
    """An answer under way: the tokens of other workers, of which some were prefilled again."""

    family: Family
    index: int
    before: tuple[int, ...] = ()
    num_kept: int = 0


class Place:
    """A device, the models that have an engine there, and the answers under way."""

    def __init__(self, number: int, device_bytes: int, log_path: Path) -> None:
        self._start: Callable[[], FamilyWorker] = partial(
            FamilyWorker, number, device_bytes, log_path
        )
        self.worker = self._start()
        self.present: list[Family] = []
        self.live: dict[str, Answer] = {}

    def restart(self) -> None:
        """Kill the worker with SIGKILL, and start another."""
        self.worker.kill()
        self.worker = self._start()
        self.present, self.live = [], {}


class Schedule(GroupCheck):
    """Random actions on two fine-tunes; ``num_bound`` counts engines that were taken over."""

    def __init__(self, families: dict[Family, Path], plain: PlainVllm) -> None:
        super().__init__(families, plain)
        first = next(iter(families))
        self.is_shared = not first.drafts
        self.num_bound = 0
        self.actions: list[str] = []
        self._rng = random.Random(first.name)
        self._kept: dict[Family, Snapshot] = {}
        self._num_asked = 0
        self._places: list[Place] = []

    def run(self, log_path: Path) -> None:
        """Carry the schedule out.

        Raises:
            AssertionError: an answer differs, or an engine was not taken over.
        """
        self._ask_vllm()
        if len(self.families) < 2:
            return
        assert not self._expected or len({tuple(one) for one in self._expected.values()}) > 3
        growth = max(family.weight_growth for family in self.families)
        largest = max(weight_bytes(self._paths[family.name]) for family in self.families)
        device_bytes = int(1.6 * growth * largest) + KV_BYTES
        with contextlib.ExitStack() as stack:
            for number in range(2):
                log = log_path.with_suffix(f".worker-{number}")
                self._places.append(Place(number, device_bytes, log))
                stack.callback(_end, self._places[-1])
            self._meet()
            self._load_all()
            for snapshot in self._kept.values():
                stack.callback(os.close, snapshot.fd)
            for _ in range(NUM_ACTIONS):
                self._act()
            for place in self._places:
                self._finish_all(place)
                for family in place.present:
                    assert place.worker.call("verify", model=family.name) == {"problem": ""}
                place.worker.close()

    def _act(self) -> None:
        several: list[Callable[[Place], None]] = [
            *[self._ask_some, self._give, self._give, self._give],
            *[self._offload, self._migrate_out, self._add_again, self._kill],
        ]
        place, action = self._rng.choice(self._places), self._rng.choice(several)
        self.actions.append(f"{action.__name__} {self._places.index(place)}")
        for _ in range(self._rng.randrange(3)):
            self._ask_some(place)
        action(place)
        for at in self._places:
            at.worker.call("check_integrity")

    def _meet(self) -> None:
        first, second = (place.worker for place in self._places)
        first.meet(second)
        second.meet(first)

    def _load_all(self) -> None:
        """Load both on the first device, from the checkpoints, and one on the second."""
        first, second = self._places
        for family in self.families:
            first.worker.load_family(family, self._paths[family.name], None)
            snapshot = first.worker.snapshots[family.name]
            self._kept[family] = snapshot._replace(fd=os.dup(snapshot.fd))
            first.present.append(family)
        self._load(second, self.families[0], is_kept=False)

    def _load(self, place: Place, family: Family, *, is_kept: bool) -> None:
        path = self._paths[family.name]
        # A model that takes over an engine can be read without one.
        snapshot = None if is_kept and self._rng.random() < 0.3 else self._kept[family]
        loaded = place.worker.load_family(family, path, snapshot, profiling_budget_s=0.0)
        assert not loaded.snapshot_problem, loaded.snapshot_problem
        assert bool(loaded.engine_of) == is_kept, f"took over {loaded.engine_of!r}"
        self.num_bound += is_kept
        place.present.append(family)

    def _unload(self, place: Place, family: Family, *, keeps_engine: bool) -> bool:
        for request_id in [one for one, answer in place.live.items() if answer.family is family]:
            self._finish(place, request_id)
        place.worker.channel.send(m.UnloadModel(family.name, keeps_engine))
        ended = place.worker.wait(m.ModelUnloaded)
        place.worker.shell.handle(e.ModelRemoved(family.name))
        place.present.remove(family)
        assert bool(ended.is_engine_kept) == (keeps_engine and self.is_shared)
        return bool(ended.is_engine_kept)

    def _give(self, place: Place) -> None:
        """Let a model take over an engine: the model that is not on the device, or either."""
        former = self._rng.choice(place.present)
        model = self._rng.choice(self._absent(place) or self.families)
        if model is not former and model in place.present:
            self._unload(place, model, keeps_engine=False)
        is_kept = self._unload(place, former, keeps_engine=True)
        self._load(place, model, is_kept=is_kept)

    def _add_again(self, place: Place) -> None:
        """Add the model that is not on the device, or remove one and add it again."""
        absent = self._absent(place)
        if not absent:
            absent = [self._rng.choice(place.present)]
            self._unload(place, absent[0], keeps_engine=False)
        self._load(place, absent[0], is_kept=False)

    def _absent(self, place: Place) -> list[Family]:
        return [family for family in self.families if family not in place.present]

    def _offload(self, place: Place) -> None:
        """Move all of a model to the host in the middle of its answers."""
        name = self._rng.choice(place.present).name
        calls = [(call, {"model": name}) for call in ("checksum", "page_out", "checksum")]
        before, _, after = place.worker.call_many(calls)
        assert before == after, "the bytes changed"

    def _migrate_out(self, place: Place) -> None:
        """Move an answer to the other device."""
        family = self._rng.choice(place.present)
        [other] = [at for at in self._places if at is not place]
        if not family.generates:
            return
        if family not in other.present:
            self._load(other, family, is_kept=False)
        self._make_way(other, family)
        request_id = self._ask_one(place, family, LONG)
        del place.live[request_id]
        moved, salt = place.worker.release(family.name, request_id), self._salt(family, request_id)
        prompt, num_tokens = self._prompt(family, LONG), SIZES[LONG][1]
        num_blocks = other.worker.receive(family.name, request_id, prompt, num_tokens, moved, salt)
        place.worker.forget_transfer(moved)
        num_kept = len(moved.tokens) * (not num_blocks and family.name in self._alone)
        other.live[request_id] = Answer(family, LONG, tuple(moved.tokens), num_kept)

    def _kill(self, place: Place) -> None:
        """Kill the worker; its answers go on in the next."""
        for request_id in [one for one, answer in place.live.items() if answer.num_kept]:
            self._finish(place, request_id)
        present, live, tokens = place.present, place.live, place.worker.tokens
        place.restart()
        self._meet()
        for family in present:
            self._load(place, family, is_kept=False)
        for request_id, answer in live.items():
            had = (*answer.before, *tokens[request_id])
            if len(had) == SIZES[answer.index][1]:
                self._compare(answer.family, answer.index, list(had))
                continue
            self._make_way(place, answer.family)
            self._ask(place.worker, answer.family, request_id, answer.index, had)
            num_kept = len(had) * (answer.family.name in self._alone)
            place.live[request_id] = replace(answer, before=had, num_kept=num_kept)

    def _ask_some(self, place: Place) -> None:
        family = self._rng.choice(place.present)
        if family.generates:
            self._ask_one(place, family, self._rng.choice([*range(len(SIZES)), LONG]))
        else:
            self._num_asked += 1
            self._pool(place.worker, family, str(self._num_asked))

    def _ask_one(self, place: Place, family: Family, index: int) -> str:
        """Ask a prompt, and wait for some tokens."""
        self._make_way(place, family)
        self._num_asked += 1
        request_id = f"{family.name}-{self._num_asked}"
        self._ask(place.worker, family, request_id, index)
        place.live[request_id] = Answer(family, index)
        place.worker.wait_tokens(request_id, self._rng.randint(MIN_TOKENS, MAX_TOKENS))
        return request_id

    def _make_way(self, place: Place, family: Family) -> None:
        """End the answers of a model whose tokens depend on the batch."""
        if family.name in self._alone:
            for request_id in [one for one, at in place.live.items() if at.family is family]:
                self._finish(place, request_id)

    def _finish_all(self, place: Place) -> None:
        for request_id in list(place.live):
            self._finish(place, request_id)

    def _finish(self, place: Place, request_id: str) -> None:
        answer = place.live.pop(request_id)
        tokens = [*answer.before, *place.worker.finish(request_id)]
        self._compare(answer.family, answer.index, tokens, answer.num_kept)


def _end(place: Place) -> None:
    if place.worker.process.poll() is None:
        place.worker.process.terminate()
        with contextlib.suppress(psutil.NoSuchProcess):
            place.worker.kill()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainVllm]:
    with PlainVllm(tmp_path_factory.mktemp("plain") / "log") as started:
        yield started


# The first fine-tunes of this family answer without regard to the image.
SEEDS = {"gemma3-vision": 5}


def tuned(family: Family, base: Path, target: Path) -> Path:
    """Make a fine-tune of a checkpoint, with the drafter of the checkpoint, if there is one."""
    path = fine_tune(base, target, SEEDS.get(family.name, 1))
    if suffix := str(family.drafts.get("model", "")):
        shutil.copytree(f"{base}{suffix}", f"{path}{suffix}")
    return path


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_pairs(name: str, plain: PlainVllm, tmp_path: Path) -> None:
    family, folder = family_named(name), ROOT / "build" / "families"
    folder.mkdir(parents=True, exist_ok=True)
    base = make_family(family, folder)
    other = replace(family, name=f"{name}-tuned")
    schedule = Schedule({family: base, other: tuned(family, base, tmp_path / "tuned")}, plain)
    try:
        schedule.run(tmp_path / "log")
    except AssertionError as error:
        error.add_note(f"after {schedule.actions}")
        raise
    for cells in schedule.cells.values():
        for cell in cells.values():
            skip_without_kernel(cell)
            pytest.skip(f"vLLM alone cannot: {cell.text}")
    assert bool(schedule.num_bound) == schedule.is_shared, schedule.actions


def test_siblings_in_a_daemon(plain: PlainVllm, tmp_path: Path) -> None:
    """Four fine-tunes with engines for two: asked at once, killed, removed and added again."""
    family, rng = family_named("llama"), random.Random(7)
    (tmp_path / "families").mkdir()
    base = make_family(family, tmp_path / "families")
    paths = {f"tune-{seed}": fine_tune(base, tmp_path / str(seed), seed) for seed in range(4)}
    expected: dict[tuple[str, int], list[int]] = {}
    for name, path in paths.items():
        plain.load(name, path, "float32", max_model_len=512)
        for index, (_, num_tokens) in enumerate(SIZES):
            expected[name, index] = plain.answer(name, prompt_of(index), num_tokens)
    config = emulated_config(int(1.6 * weight_bytes(base)) + KV_BYTES, num_devices=2)
    with (
        private_daemon(config, tmp_path, server="frontends = 1") as daemon,
        daemon.client() as pool,
    ):
        add = partial(daemon.add_model, dtype="float32", max_model_len=512)
        add("tune-0", paths["tune-0"])
        limit_engines(daemon)
        for name in sorted(paths.keys() - {"tune-0"}):
            add(name, paths[name])

        def ask(model: str, index: int) -> list[int]:
            body = {
                "model": model,
                "prompt": prompt_of(index).token_ids,
                "max_tokens": SIZES[index][1],
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            url = f"{daemon.http_url}/v1/completions"
            answer = httpx.post(url, json=body, timeout=180)
            assert answer.status_code == 200, f"{model}: {answer.text}"
            return list(answer.json()["choices"][0]["token_ids"])

        for number in range(6):
            resting = rng.choice(sorted(paths))
            others = sorted(paths.keys() - {resting})
            asked = [(rng.choice(others), rng.randrange(len(SIZES))) for _ in range(8)]
            with ThreadPoolExecutor(len(asked)) as threads:
                answers = [threads.submit(ask, *one) for one in asked]
                if number % 2:
                    pool.remove_model(resting)
                    while True:
                        try:
                            add(resting, paths[resting])
                            break
                        except Refused as error:
                            if "wait until requests have ended" not in error.hint:
                                raise
                            time.sleep(0.5)  # all engines are in use
                elif number:
                    os.kill(rng.choice([at.pid for at in pool.ps().devices if at.pid]), SIGKILL)
                for one, answer in zip(asked, answers, strict=True):
                    assert answer.result() == expected[one], f"round {number}: {one}"
        given = [event for event in pool.events() if "was given to" in event.message]
        assert given
        pool.check()
