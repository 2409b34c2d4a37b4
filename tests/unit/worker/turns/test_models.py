"""Loads that take an engine over, and engines that are kept for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpupoold.domain import ModelName
from gpupoold.durations import GraphSizes
from gpupoold.errors import Refused
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.wire import messages as m
from gpupoold.worker.device import DriverMemory
from gpupoold.worker.threads import TurnThread
from gpupoold.worker.turns import loads
from gpupoold.worker.turns.loads import EngineLoader, KeptEngine, LoadOrder
from gpupoold.worker.turns.models import DeviceModels
from gpupoold.worker.weights.loading import Sharing
from gpupoold.worker.weights.reading import HostLoadFails


@dataclass
class PlayedEngine:
    """Tells what is done to it."""

    name: str
    told: list[str]
    sharing: Sharing = field(default_factory=lambda: Sharing("llama"))
    has_snapshot: bool = True
    layout_digest: str = "old"
    memory: m.EngineMemory = field(default_factory=lambda: m.EngineMemory(7, 8))
    graphs: Any = None

    @property
    def worker(self) -> Any:
        return self

    @property
    def weights(self) -> Any:
        return self

    @property
    def info(self) -> Any:
        return SimpleNamespace(name=self.name, generates=True)

    def close(self) -> None:
        self.told.append(f"close {self.name}")


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def models(told: list[str]) -> DeviceModels:
    engines = {name: PlayedEngine(name, told) for name in ("a", "b")}
    engines["alone"] = PlayedEngine("alone", told, sharing=Sharing())
    engines["detached"] = PlayedEngine("detached", told, has_snapshot=False)
    engines["asked"] = PlayedEngine("asked", told)
    residency = SimpleNamespace(
        remove=lambda name: told.append(f"remove {name}"),
        vacate=lambda name: told.append(f"vacate {name}"),
    )
    ledger = SimpleNamespace(
        remove_model=lambda name: None,
        add_model=lambda *_: None,
        live_requests=lambda name: ["r1"] if name == "asked" else [],
    )
    checks = SimpleNamespace(forget=lambda name: None)
    own = SimpleNamespace(device=EmulatedDevice(1 << 20))
    make: Any = DeviceModels
    made: DeviceModels = make(
        own, engines, ledger, residency, checks, send=lambda *_: None, abort=lambda *_: None
    )
    return made


def order_for(model: str) -> LoadOrder:
    loaded = m.ModelToLoad(name=ModelName(model), source=model, path="/none", dtype="float32")
    return LoadOrder(m.LoadModel(loaded), -1)


def test_the_next_load_gets_it(models: DeviceModels, told: list[str]) -> None:
    """After its pages have been freed."""
    assert models.close("a", kept_until_s=10.0)
    assert told == ["vacate a"]
    order, later = order_for("c"), order_for("d")
    models.begin_load(order, 1.0)
    models.begin_load(later, 1.0)
    assert order.kept is not None
    assert (order.kept.name, order.kept.memory) == ("a", m.EngineMemory(7, 8))
    assert later.kept is None
    assert not models.is_kept_too_long(99.0)


def test_it_is_closed_in_time_or_for_another(models: DeviceModels, told: list[str]) -> None:
    models.close("a", kept_until_s=10.0)
    models.close("b", kept_until_s=20.0)
    assert told[1:] == ["close a", "vacate b"]
    assert not models.is_kept_too_long(19.0)
    assert models.is_kept_too_long(20.0)
    models.close_kept()
    models.close_kept()
    assert told[3:] == ["close b"]


@pytest.mark.parametrize(
    ("name", "until_s"), [("a", 0.0), ("alone", 9.0), ("detached", 9.0), ("asked", 9.0)]
)
def test_others_are_closed_at_once(
    models: DeviceModels, told: list[str], name: str, until_s: float
) -> None:
    """Engines that nobody asks for, without a family or a snapshot, or with requests."""
    assert not models.close(name, until_s)
    assert told == [f"remove {name}", f"close {name}"]
    assert not models.close(name, until_s)


@pytest.fixture
def loader(told: list[str], monkeypatch: pytest.MonkeyPatch) -> EngineLoader:
    """A loader whose engines are played."""

    def built(
        message: m.LoadModel, snapshot: HostBuffer, name: str, *, skips_checkpoint: bool
    ) -> PlayedEngine:
        told.append(f"build {message.layout_digest} {skips_checkpoint}")
        snapshot.close()
        return PlayedEngine(name, told)

    device = EmulatedDevice(1 << 20)
    unused: Any = None
    made: Any = EngineLoader(device, unused, unused, TurnThread(), DriverMemory(device))
    load = SimpleNamespace(layout=SimpleNamespace(digest="new"))
    monkeypatch.setattr(made, "_new_load", lambda *_, **__: load)
    monkeypatch.setattr(made, "_build", built)
    monkeypatch.setattr(made, "_try", lambda engine: (1, 2))
    loader: EngineLoader = made
    return loader


def test_a_new_model_of_another_layout_gets_an_engine_of_its_own(
    loader: EngineLoader, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout is known when the model has been read, which is not done twice."""
    snapshot = HostBuffer.create("made", 4096)
    monkeypatch.setattr(loads, "make_snapshot", lambda *_: snapshot)
    kept: Any = KeptEngine(PlayedEngine("a", told), SimpleNamespace(vllm_config=None))  # type: ignore[arg-type]
    loaded = loader._load(order_for("c").message, None, "c", kept)
    assert (loaded.engine_of, loaded.self_check) == ("", (1, 2))
    assert told == ["close a", "build new True"]


@pytest.mark.parametrize("has_kept", [False, True])
def test_a_load_that_fails_in_host_memory_is_made_in_device_memory(
    told: list[str], monkeypatch: pytest.MonkeyPatch, has_kept: bool
) -> None:
    def build(model: object, load: Any, *_: object) -> PlayedEngine:
        told.append(load.why_on_device or "on the host")
        if not load.why_on_device:
            raise HostLoadFails("no kernel")
        return PlayedEngine("c", told)

    device = EmulatedDevice(1 << 20)
    residency: Any = SimpleNamespace(add=lambda _: None)
    unused: Any = None
    loader: Any = EngineLoader(device, unused, residency, TurnThread(), DriverMemory(device))
    new_load = lambda *_, why_on_device="", **__: SimpleNamespace(why_on_device=why_on_device)  # noqa: E731
    monkeypatch.setattr(loader, "_new_load", new_load)
    monkeypatch.setattr(loader, "_try", lambda engine: (1, 2))
    monkeypatch.setattr(loads, "load_engine", build)
    monkeypatch.setattr(loads, "make_snapshot", lambda name, load, _: build(name, load))
    config: Any = SimpleNamespace(vllm_config=None)
    engine: Any = PlayedEngine("a", told)
    kept = KeptEngine(engine, config) if has_kept else None
    loaded = loader._load(order_for("c").message, None, "c", kept)
    assert loaded.engine.name == "c"
    own = ["on the host", "close a"] if has_kept else []
    assert told == [*own, "on the host", "no kernel"]
    device.close()


def test_an_engine_does_not_stay_if_the_new_model_cannot_be_read(
    loader: EngineLoader, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> HostBuffer:
        raise Refused("c: no weights")

    monkeypatch.setattr(loads, "make_snapshot", refuse)
    kept: Any = KeptEngine(PlayedEngine("a", told), SimpleNamespace(vllm_config=None))  # type: ignore[arg-type]
    with pytest.raises(Refused):
        loader._load(order_for("c").message, None, "c", kept)
    assert told == ["close a"]


@dataclass
class PlayedGraphs:
    """Tells of captures."""

    name: str
    told: list[str]
    sizes: GraphSizes = field(default_factory=lambda: GraphSizes(4, num_left=2))

    def capture_next(self) -> None:
        self.told.append(f"capture {self.name}")
        self.sizes = replace(self.sizes, num_left=self.sizes.num_left - 1)


def test_models_on_the_device_capture_size_by_size(models: DeviceModels, told: list[str]) -> None:
    """The model that ran last first."""
    sent: list[Any] = []
    models.send = lambda message, _: sent.append(message)
    models.residency.begin_use = {"a", "b"}.__contains__  # type: ignore[method-assign, assignment]
    for at_s, (name, engine) in enumerate(models.engines.items()):
        models.last_used_s[name] = at_s
        played: Any = engine
        if name != "asked":
            played.graphs = PlayedGraphs(name, told)
    for _ in range(5):
        models.capture_graphs()
    assert told == ["capture b"] * 2 + ["capture a"] * 2
    assert [(one.model, one.graphs.num_left) for one in sent] == [
        ("b", 1),
        ("b", 0),
        ("a", 1),
        ("a", 0),
    ]
