"""What an added model costs before it is refused: small files only; and devices that are down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
from huggingface_hub import snapshot_download
from safetensors.numpy import save

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import AddModelRequest, Progress
from gpupoold.control.models import additions
from gpupoold.control.workers import workers as workers_module
from gpupoold.domain import ModelState
from gpupoold.errors import Failed, GpupoolError, Refused, Unavailable
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.fake_hub import FakeHub, run_hub
from tests.unit.control.models.models_box import PAGE, ModelsBox, running

REPO = "org/model"
NUM_ELEMENTS = 8_000_000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a checkpoint of 16 MB."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    weights = save({"model.embed.weight": np.zeros(NUM_ELEMENTS, "float16")})
    with run_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add(REPO, samples.checkpoint() | {"model.safetensors": weights})
        yield hub


@pytest_asyncio.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    async with running(ModelsBox(tmp_path, registry, history, num_snapshots=8192)) as made:
        await made.until(lambda: all(one.is_ready for one in made.supervisor.workers))
        yield made


async def lines(box: ModelsBox, **options: object) -> list[Progress]:
    request = AddModelRequest.model_validate({"name": "new", "source": REPO} | options)
    return [line async for line in box.lifecycle.add(request)]


async def refusal(box: ModelsBox) -> GpupoolError:
    with pytest.raises(Refused) as caught:
        await lines(box)
    assert not box.fleet.knows("new")
    assert await box.registry.list() == []
    return caught.value


def fill_cache(hub: FakeHub, folder: Path) -> None:
    """Fill the shared cache as another program does."""
    snapshot_download(REPO, cache_dir=folder / "hf", endpoint=hub.url)
    hub.requests.clear()


def weight_bytes_sent(hub: FakeHub) -> int:
    return sum(one.sent_bytes for one in hub.downloads("model.safetensors"))


async def test_all_stages_of_an_added_model(box: ModelsBox, hub: FakeHub) -> None:
    found = await lines(box)
    stages = list(dict.fromkeys(one.stage for one in found))
    assert stages == ["resolve", "download", "check", "load", "spread", "ready"]
    downloads = [one for one in found if one.stage == "download"]
    assert max(one.total_bytes or 0 for one in downloads) > 2 * NUM_ELEMENTS
    assert weight_bytes_sent(hub) < 2.1 * NUM_ELEMENTS


async def test_a_check_costs_small_files(box: ModelsBox, hub: FakeHub) -> None:
    found = await lines(box, check_only=True)
    assert found[-1].model is not None
    assert found[-1].model.weight_bytes == 2 * NUM_ELEMENTS
    assert weight_bytes_sent(hub) <= 1 << 16
    assert await box.registry.list() == []
    assert (await lines(box))[-1].stage == "ready"


async def test_vllm_is_asked_once_before_the_weights_are_there(
    box: ModelsBox, hub: FakeHub
) -> None:
    small = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    box.inspector.error = Refused("the architecture X is not supported by vLLM", "see the list")
    assert "not supported by vLLM" in (await refusal(box)).message
    assert weight_bytes_sent(hub) <= 1 << 16
    box.inspector.error = None
    await lines(box)
    assert box.inspector.asked == [("new", small), ("new", small)]


async def test_a_device_that_is_too_small(box: ModelsBox, hub: FakeHub) -> None:
    for worker in box.supervisor.workers:
        assert worker.ready is not None
        worker.ready.facts.device_bytes = 10_000_000
    error = await refusal(box)
    assert "15.3 MiB of weights" in error.message
    assert "do not fit on a device of 9.54 MiB" in error.message
    assert weight_bytes_sent(hub) <= 1 << 16


async def test_a_model_cache_that_is_too_small(box: ModelsBox, hub: FakeHub) -> None:
    box.cache.budget_bytes = 1024 * PAGE
    error = await refusal(box)
    assert "a snapshot of 15.3 MiB does not fit in the model cache of 4 MiB" in error.message
    assert error.hint == (
        "set memory.model_cache to 16MiB or more in /etc/gpupool/gpupool.toml, "
        "then run `gpupool reload`"
    )
    assert weight_bytes_sent(hub) <= 1 << 16


async def test_a_hub_without_ranges_is_checked_before_the_weights_too(
    box: ModelsBox, hub: FakeHub
) -> None:
    hub.ignores_range = True
    box.cache.budget_bytes = 1024 * PAGE
    error = await refusal(box)
    assert "a snapshot of 15.3 MiB does not fit in the model cache of 4 MiB" in error.message
    assert (
        weight_bytes_sent(hub) < NUM_ELEMENTS
    )  # some pieces of the 16 MB, until the connection closes
    assert len(hub.downloads("model.safetensors")) == 1


async def test_host_memory_that_others_use(
    box: ModelsBox, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(additions, "available_bytes", lambda: 9 << 20)
    error = await refusal(box)
    assert "a snapshot of 15.3 MiB needs more than the 9 MiB of host memory" in error.message
    assert weight_bytes_sent(hub) <= 1 << 16


async def test_a_disk_that_is_too_small(
    box: ModelsBox, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=12 << 20)
    monkeypatch.setattr("gpupoold.checkpoints.download.shutil.disk_usage", lambda _: free)
    error = await refusal(box)
    assert "15.3 MiB is missing; 12 MiB is free" in error.message
    assert hub.downloads("model.safetensors") == hub.downloads("tokenizer.json") == []


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
async def test_a_client_that_leaves_during_a_download(
    box: ModelsBox, hub: FakeHub, file: str
) -> None:
    hub.holds[file] = [1]
    reading = asyncio.create_task(lines(box))
    assert await asyncio.to_thread(hub.held.wait, 10)
    reading.cancel()
    hub.released.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await box.until(lambda: not box.fleet.knows("new"))
    async with asyncio.timeout(20):
        while True:  # the download's threads end at their next bytes
            try:
                assert (await lines(box))[-1].stage == "ready"
                break
            except Refused as error:
                if "is being downloaded" not in error.message:
                    raise
                await asyncio.sleep(0.02)


class TestCaches:
    async def test_a_complete_snapshot_costs_no_download(
        self, box: ModelsBox, hub: FakeHub, tmp_path: Path
    ) -> None:
        fill_cache(hub, tmp_path)
        found = await lines(box)
        stages = list(dict.fromkeys(one.stage for one in found))
        assert stages == ["resolve", "check", "load", "spread", "ready"]
        model = found[-1].model
        assert model is not None
        assert (model.source, Path(model.path).parent.name) == (REPO, "snapshots")
        assert found[1].note == f"used in place, without a download: {model.path}"
        assert not hub.requests
        assert not (tmp_path / "models").exists()

    async def test_an_incomplete_snapshot_is_not_used(
        self, box: ModelsBox, hub: FakeHub, tmp_path: Path
    ) -> None:
        fill_cache(hub, tmp_path)
        for weights in (tmp_path / "hf").rglob("model.safetensors"):
            weights.unlink()
        found = await lines(box)
        assert "incomplete or unreadable: model.safetensors" in found[1].note
        model = found[-1].model
        assert model is not None
        assert Path(model.path) == tmp_path / "models" / "org--model"

    async def test_a_finished_download_comes_first(
        self, box: ModelsBox, hub: FakeHub, tmp_path: Path
    ) -> None:
        await lines(box)
        await box.lifecycle.remove("new", "force")
        fill_cache(hub, tmp_path)
        model = (await lines(box))[-1].model
        assert model is not None
        assert Path(model.path) == tmp_path / "models" / "org--model"


class TestWithoutAReader:
    async def test_the_daemon_goes_on(self, box: ModelsBox, hub: FakeHub) -> None:
        found = await lines(box, detach=True)
        stages = list(dict.fromkeys(one.stage for one in found))
        assert stages == ["resolve", "download", "check", "detached"]
        await box.until_ready("new")
        await box.until(lambda: not box.lifecycle.ongoing.infos())
        assert "model_added" in await box.events()

    async def test_a_stop_leaves_nothing(self, box: ModelsBox, hub: FakeHub) -> None:
        box.hold(0, 1)
        await lines(box, detach=True)
        await box.until(lambda: bool(box.waiting))
        await box.supervisor.stop()
        await box.lifecycle.stop()
        assert await box.registry.get("new") is None
        assert not box.fleet.knows("new")

    async def test_refusals_come_before_the_reader_leaves(
        self, box: ModelsBox, hub: FakeHub
    ) -> None:
        box.cache.budget_bytes = 1024 * PAGE
        with pytest.raises(Refused, match="does not fit in the model cache"):
            await lines(box, detach=True)
        assert box.lifecycle.ongoing.infos() == []

    async def test_the_share_of_a_download_is_known_meanwhile(
        self, box: ModelsBox, hub: FakeHub
    ) -> None:
        hub.holds["model.safetensors"] = [-1, 8_000_000]
        await lines(box, detach=True)
        assert await asyncio.to_thread(hub.held.wait, 10)
        (info,) = box.lifecycle.ongoing.infos()
        assert (info.name, info.stage) == ("new", "download")
        assert info.total_bytes is not None
        assert info.total_bytes > 2 * NUM_ELEMENTS
        with pytest.raises(Refused, match="being added already"):
            await lines(box)
        assert len(box.lifecycle.ongoing.infos()) == 1
        hub.released.set()
        await box.until_ready("new")

    @pytest.mark.parametrize("stage", ["download", "load"])
    async def test_a_later_failure_is_one_event(
        self, stage: str, box: ModelsBox, hub: FakeHub
    ) -> None:
        if stage == "download":
            hub.statuses["model.safetensors"] = [0, 403]
        else:
            box.errors["new"] = Failed("out of memory")
        await lines(box, detach=True)
        await box.until(lambda: not box.lifecycle.ongoing.infos())
        await box.until(lambda: not box.fleet.knows("new"))
        assert (await box.events()).count("model_refused") == 1


class TestWorkersThatAreDown:
    async def test_one_does_not_block_the_others(
        self, tmp_path: Path, registry: Registry, history: History, hub: FakeHub
    ) -> None:
        box = ModelsBox(tmp_path, registry, history, num_snapshots=8192)
        box.broken.add(1)
        async with running(box):
            await box.until(lambda: box.supervisor.workers[0].is_ready)
            await box.until(lambda: box.supervisor.workers[1].state == "down")
            assert (await lines(box))[-1].stage == "ready"
            assert box.told == ["build new on 0"]
            box.broken.clear()
            await box.until_ready("new")
            row = await registry.get("new")
            assert row is not None
            assert row.state is ModelState.READY

    async def test_a_model_for_a_larger_device_waits_for_that_device(
        self, tmp_path: Path, registry: Registry, history: History, hub: FakeHub
    ) -> None:
        box = ModelsBox(tmp_path, registry, history, num_snapshots=8192)
        box.broken.add(1)
        async with running(box):
            await box.until(lambda: box.supervisor.workers[0].is_ready)
            small = box.supervisor.workers[0].ready
            assert small is not None
            small.facts.device_bytes = 10_000_000
            checking = asyncio.create_task(lines(box, check_only=True))
            await box.until(lambda: bool(hub.downloads("model.safetensors")))
            box.broken.clear()
            assert (await checking)[-1].model is not None

    async def test_all_of_them(
        self,
        tmp_path: Path,
        registry: Registry,
        history: History,
        hub: FakeHub,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(workers_module, "_READY_TIMEOUT_S", 0.2)
        monkeypatch.setattr(workers_module, "_RESTART_TIMEOUT_S", 0.2)
        box = ModelsBox(tmp_path, registry, history, num_snapshots=8192)
        box.broken |= {0, 1}
        async with running(box):
            with pytest.raises(Unavailable, match="worker 0 is down"):
                await lines(box)
        assert weight_bytes_sent(hub) <= 1 << 16
