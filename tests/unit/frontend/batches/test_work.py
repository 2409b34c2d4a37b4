"""Batches with answers of the test's own: repeats, restarts, the end of the window or the key."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpupool_state.batches import BatchRow, BatchStore, FileRow, ResultRow
from gpupoold.config.sections import BatchSettings
from gpupoold.frontend.batches.api import batch_object
from gpupoold.frontend.batches.files import StoredFiles
from gpupoold.frontend.batches.places import Places
from gpupoold.frontend.batches.service import BatchRunner
from gpupoold.frontend.batches.work import BatchWorker, JsonAnswer
from gpupoold.frontend.callers import Caller

pytestmark = pytest.mark.asyncio
CHAT = "/v1/chat/completions"


def body_of(number: int) -> dict[str, Any]:
    return {"body": {"model": str(number)}}


class Rig:
    """A batch of ``num_lines`` requests; ``answers`` are the statuses, in order, else 200."""

    def __init__(
        self, store: BatchStore, files: StoredFiles, bounds: BatchSettings, num_lines: int = 10
    ) -> None:
        self.store = store
        self.files = files
        self.num_lines = num_lines
        self.bounds = bounds
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.caller: Caller | None = Caller(is_batch=True)
        self.num_at_once = self.most_at_once = 0
        self.num_answered = 1000
        self.waits: list[tuple[str, str]] = []
        self.work = BatchWorker(
            store,
            files,
            self._ask,
            lambda owner: self.caller,
            Places(5),
            bounds,
            lambda row, reason: self.waits.append((row.id, reason)),
        )

    async def begin(
        self,
        window_s: float = 3600.0,
        batch_id: str = "batch_1",
        owner: str = "k",
        models: Sequence[str] | None = None,
    ) -> BatchRow:
        """Begin a batch with a line for each of ``models``, by default all different."""
        lines = [
            json.dumps(
                {"custom_id": f"c{k}", "method": "POST", "url": CHAT, "body": {"model": one}}
            )
            for k, one in enumerate(models or map(str, range(self.num_lines)))
        ]
        kept = self.files.save(io.BytesIO("\n".join(lines).encode()))
        now = int(time.time())
        await self.store.add_file(FileRow(kept.id, owner, "batch", "in", kept.num_bytes, now))
        row = BatchRow(
            batch_id,
            CHAT,
            now,
            now + int(window_s),
            owner=owner,
            input_file_id=kept.id,
            completion_window="1h",
        )
        await self.store.add_batch(row)
        return row

    async def bring_to_end(self, batch_id: str = "batch_1") -> BatchRow:
        while True:
            row = await self.store.batch(batch_id)
            assert row is not None
            if row.ended_at is not None:
                return row
            await self.work.bring_on(row)

    async def lines(self, file_id: str | None) -> dict[str, Any]:
        if file_id is None:
            return {}
        text = self.files.path(file_id).read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return {one["custom_id"]: one for one in found}

    async def _ask(self, caller: Caller, path: str, body: bytes) -> JsonAnswer:
        assert caller.is_batch
        name = json.loads(body)["model"]
        self.asked[name] += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
            if self.asked.total() > self.num_answered:
                await asyncio.Event().wait()
        finally:
            self.num_at_once -= 1
        statuses = self.answers.get(name, [])
        status = statuses.pop(0) if statuses else 200
        reason = f"{name} says {status}" if status >= 400 else ""
        return JsonAnswer(status, f"id-{name}", b'{\n "of": "%s"\n}' % name.encode(), 0.02, reason)


@pytest.fixture
def rig(store: BatchStore, files: StoredFiles, bounds: BatchSettings) -> Rig:
    return Rig(store, files, bounds)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupoold.frontend.batches.work._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("gpupoold.frontend.batches.work._PASS_S", 0.01)
    monkeypatch.setattr("gpupoold.frontend.batches.service._POLL_S", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_all_is_answered_once_and_few_at_a_time(rig: Rig) -> None:
    await rig.begin()
    rig.gate.clear()
    ending = asyncio.create_task(rig.bring_to_end())
    await until(lambda: rig.num_at_once == 4)
    rig.gate.set()
    row = await ending
    assert (row.status, row.num_requests, row.num_completed, row.num_failed) == (
        "completed",
        10,
        10,
        0,
    )
    assert rig.asked == Counter({str(k): 1 for k in range(10)})
    assert rig.most_at_once == 4
    found = await rig.lines(row.output_file_id)
    assert list(found) == [f"c{k}" for k in range(10)]
    response = {"status_code": 200, "request_id": "id-3", "body": {"of": "3"}}
    assert (found["c3"]["response"], found["c3"]["error"]) == (response, None)
    assert row.error_file_id is None
    assert await rig.store.done_lines(row.id) == set()


async def test_momentary_refusals_are_repeated_and_errors_are_results(rig: Rig) -> None:
    rig.answers = {
        "1": [429, 503, 503, 429, 429],
        "2": [500, 500],
        "3": [500] * 9,
        "4": [400],
        "5": [422] * 9,  # a request that has ended workers
    }
    await rig.begin()
    row = await rig.bring_to_end()
    assert (row.num_completed, row.num_failed) == (7, 3)
    assert [rig.asked[name] for name in "12345"] == [6, 3, 3, 1, 1]
    errors = await rig.lines(row.error_file_id)
    statuses = {name: one["response"]["status_code"] for name, one in errors.items()}
    assert statuses == {"c3": 500, "c4": 400, "c5": 422}
    assert rig.waits == [("batch_1", "1 says 429")]
    assert (row.waits_because, row.next_try_at) == ("", None)
    assert row.models == [str(number) for number in range(8)]


async def test_a_refused_model_stops_no_other_batch(rig: Rig) -> None:
    rig.answers = {"bad": [503] * 10**6}
    await rig.begin(batch_id="batch_a", owner="a", models=["bad"] * 100)
    await rig.begin(batch_id="batch_b", owner="b", models=["good", "good"])
    await rig.begin(batch_id="batch_c", owner="a", models=["bad"] * 3 + ["good"])
    runner = asyncio.create_task(BatchRunner(rig.store, rig.files, rig.work, 3600.0).run())
    async with asyncio.timeout(20):
        while (row := await rig.store.batch("batch_b")) is None or row.ended_at is None:
            await asyncio.sleep(0.01)
        while (mixed := await rig.store.batch("batch_c")) is None or not mixed.waits_because:
            await asyncio.sleep(0.01)
    assert (row.status, row.num_completed) == ("completed", 2)
    assert (mixed.status, mixed.num_completed, mixed.num_failed) == ("in_progress", 1, 0)
    stuck = await rig.store.batch("batch_a")
    assert stuck is not None
    assert (stuck.status, stuck.num_completed, stuck.num_failed) == ("in_progress", 0, 0)
    assert stuck.waits_because == "bad says 503"
    assert stuck.next_try_at is not None
    assert batch_object(stuck)["status_details"]["reason"] == "bad says 503"
    assert sorted(rig.waits) == [("batch_a", "bad says 503"), ("batch_c", "bad says 503")]
    rig.answers.clear()
    async with asyncio.timeout(20):
        while (ended := await rig.store.batch("batch_a")) is None or ended.ended_at is None:
            await asyncio.sleep(0.01)
    assert (ended.status, ended.num_completed, ended.waits_because) == ("completed", 100, "")
    runner.cancel()
    await asyncio.wait([runner])


async def test_a_batch_without_answers_for_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupoold.frontend.batches.work._STILL_S", 0.05)
    await rig.begin()
    rig.gate.clear()
    runner = asyncio.create_task(BatchRunner(rig.store, rig.files, rig.work, 3600.0).run())
    await until(lambda: bool(rig.waits))
    row = await rig.store.batch("batch_1")
    assert row is not None
    assert "wait for a place or for a device" in row.waits_because
    assert row.next_try_at is None
    rig.gate.set()
    async with asyncio.timeout(10):
        while (row := await rig.store.batch("batch_1")) is None or row.ended_at is None:
            await asyncio.sleep(0.01)
    assert (row.status, row.waits_because, len(rig.waits)) == ("completed", "", 1)
    runner.cancel()
    await asyncio.wait([runner])


async def test_a_batch_takes_no_more_than_its_share_of_places(rig: Rig) -> None:
    await rig.begin(batch_id="batch_a", owner="a", models=["slow"] * 20)
    rig.gate.clear()
    runner = asyncio.create_task(BatchRunner(rig.store, rig.files, rig.work, 3600.0).run())
    await until(lambda: rig.asked["slow"] == 4)
    await rig.begin(batch_id="batch_b", owner="b", models=["other"])
    await until(lambda: rig.asked["other"] == 1)
    assert rig.asked["slow"] == 4
    runner.cancel()
    await asyncio.wait([runner])


async def test_stored_results_are_not_asked_again(rig: Rig) -> None:
    row = await rig.begin()
    await rig.work.bring_on(row)  # validates
    for number in (0, 7):
        body = json.dumps({"custom_id": f"c{number}", "before": True}).encode()
        await rig.store.add_result(row.id, ResultRow(number, False, body))
        await rig.store.add_result(row.id, ResultRow(number, False, b"again"))
    row = await rig.bring_to_end()
    assert "0" not in rig.asked and "7" not in rig.asked  # noqa: PT018
    found = await rig.lines(row.output_file_id)
    assert (len(found), row.num_completed) == (10, 10)
    assert found["c7"]["before"]


async def test_work_that_was_cut_off_goes_on(rig: Rig) -> None:
    await rig.begin()
    rig.gate.clear()
    runner = asyncio.create_task(BatchRunner(rig.store, rig.files, rig.work, 3600.0).run())
    await until(lambda: rig.num_at_once == 4)
    runner.cancel()
    await asyncio.wait([runner])
    assert rig.num_at_once == 0
    rig.gate.set()
    row = await rig.bring_to_end()
    assert (row.status, row.num_completed) == ("completed", 10)


async def test_a_request_that_ends_frontends_is_not_asked_for_ever(rig: Rig) -> None:
    asked: Counter[str] = Counter()

    async def ask(caller: Caller, path: str, body: bytes) -> JsonAnswer:
        name = json.loads(body)["model"]
        asked[name] += 1
        if name.startswith("bad"):
            await asyncio.Event().wait()
        return await rig._ask(caller, path, body)

    row = await rig.begin(models=["bad1", "good", "bad2"])
    workers: list[BatchWorker] = []
    for num in (1, 2, 3, 4):
        work = BatchWorker(
            rig.store, rig.files, ask, lambda _: rig.caller, Places(9), rig.bounds, lambda *_: None
        )
        workers.append(work)
        runner = asyncio.create_task(BatchRunner(rig.store, rig.files, work, 3600.0).run())
        if num < 3:
            await until(lambda: asked["bad1"] == asked["bad2"] == len(workers))
            async with asyncio.timeout(10):
                while not await rig.store.results(row.id, has_failed=False):
                    await asyncio.sleep(0.01)
        elif num == 3:  # each alone
            await until(lambda: asked["bad1"] + asked["bad2"] == 5)
        else:
            await until(lambda: asked["bad1"] + asked["bad2"] == 6)
            async with asyncio.timeout(10):
                while not (found := await rig.store.results(row.id, has_failed=True)):
                    await asyncio.sleep(0.01)
        runner.cancel()  # as if the frontend had been killed: nothing is written at its end
        await asyncio.wait([runner])
    assert asked["good"] == 1
    [result] = found
    error = json.loads(result.body)["response"]["body"]["error"]
    assert error["code"] == "request_ended_frontend"
    await rig.store.forget_asked()
    assert await rig.store.asked() == {}


@pytest.mark.parametrize("reason", ["cancelled", "expired", "key"])
async def test_the_end_before_all_is_answered(rig: Rig, reason: str) -> None:
    row = await rig.begin(window_s=3600.0)
    rig.answers = {"0": [400]}
    rig.num_answered = 5
    runner = asyncio.create_task(BatchRunner(rig.store, rig.files, rig.work, 3600.0).run())
    await until(lambda: rig.asked.total() > 5)
    if reason == "cancelled":
        assert await rig.store.change(row.id, "in_progress", status="cancelling")
    elif reason == "expired":
        assert await rig.store.change(row.id, "in_progress", expires_at=1)
    else:
        rig.caller = None
    async with asyncio.timeout(10):
        while (now := await rig.store.batch(row.id)) is None or now.ended_at is None:
            await asyncio.sleep(0.01)
    runner.cancel()
    await asyncio.wait([runner])
    assert now.status == ("expired" if reason == "expired" else "cancelled")
    done, errors = await rig.lines(now.output_file_id), await rig.lines(now.error_file_id)
    assert len(done) == now.num_completed < 10
    assert errors["c0"]["response"]["status_code"] == 400
    if reason == "expired":
        assert done.keys() | errors.keys() == {f"c{k}" for k in range(10)}
        assert errors["c9"]["error"]["code"] == "batch_expired"
    else:
        assert errors.keys() == {"c0"}


@pytest.mark.parametrize("is_of_key", [True, False])
async def test_a_batch_without_room_for_results_pauses(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_of_key: bool
) -> None:
    monkeypatch.setattr("gpupoold.frontend.batches.work._ROOM_S", 0.01)
    large = rig.files.save(io.BytesIO(b"x" * 9_000))
    await rig.store.add_file(FileRow(large.id, "k", "batch", "large", 9_000, int(time.time())))
    all_bytes, key_bytes = (50_000, 12_000) if is_of_key else (12_000, 50_000)
    rig.work.bounds = rig.bounds.model_copy(
        update={"max_bytes": all_bytes, "max_key_bytes": key_bytes}
    )
    await rig.begin()
    ending = asyncio.create_task(rig.bring_to_end())
    async with asyncio.timeout(10):
        while (row := await rig.store.batch("batch_1")) is None or row.status != "in_progress":
            await asyncio.sleep(0.01)
    await until(lambda: bool(rig.waits))
    assert not rig.asked
    assert "until files are deleted" in rig.waits[0][1]
    await rig.store.remove_file(large.id)
    async with asyncio.timeout(10):
        row = await ending
    assert (row.status, row.num_completed) == ("completed", 10)


async def test_old_files_and_batches_are_removed(rig: Rig) -> None:
    row = await rig.begin()
    before = await rig.bring_to_end()
    await rig.store._db.close()
    rig.store = await BatchStore.open(rig.files.path("").parent)
    work = BatchWorker(
        rig.store, rig.files, rig._ask, lambda _: None, Places(1), rig.bounds, lambda *_: None
    )
    runner = asyncio.create_task(BatchRunner(rig.store, rig.files, work, -10.0).run())
    async with asyncio.timeout(10):
        while await rig.store.batch(row.id) is not None:
            await asyncio.sleep(0.01)
    runner.cancel()
    await asyncio.wait([runner])
    assert await rig.store.file_ids() == set()
    assert before.output_file_id is not None
    assert not rig.files.path(before.output_file_id).exists()
    await rig.store.close()
