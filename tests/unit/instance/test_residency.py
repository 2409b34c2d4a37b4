"""Who is brought in beside whom, and what gives way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpupoold.instance.residency import Residency, Use
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.weights import WeightMemory
from tests.unit.memory.ledger import MemoryLedger
from tests.unit.memory.rig import PAGE, Rig, geometry_of, read

WEIGHT_PAGES = 20


@dataclass
class Model:
    """A model that wants as many KV blocks as the test says."""

    name: str
    weights: WeightMemory
    kv: KvMemory
    ledger: MemoryLedger
    image: bytes
    num_wanted: int = 0

    def preempt(self) -> None:
        raise AssertionError("nobody has to lose its KV")

    def num_missing_blocks(self) -> int:
        return max(0, self.num_wanted - self.ledger.num_free)


class Box:
    """Three models on a device; of those that are idle, b was used least recently."""

    def __init__(self, num_pages: int) -> None:
        self.rig = Rig(num_pages)
        self.uses: dict[str, Use] = {}
        self.residency = Residency(
            self.rig.device, self.rig.pool, self.rig.host, 1e9, self.uses.__getitem__
        )
        self.models: dict[str, Model] = {}
        for number, name in enumerate("abc"):
            weights, image = self.rig.weights(WEIGHT_PAGES, name)
            kv, ledger = self.rig.kv(geometry_of("blocks-outermost"))
            self.models[name] = Model(name, weights, kv, ledger, image)
            self.uses[name] = Use(0, float(number), 10.0, math.inf)
            self.residency.add(self.models[name])

    def weights(self, name: str) -> WeightMemory:
        return self.models[name].weights

    def switch_in(self, name: str) -> int:
        """Bytes of weights that the switch itself had to move; the model's bytes are right."""
        stages = self.residency.switch_in(name)
        model = self.models[name]
        assert model.weights.is_resident
        assert read(model.weights.address, len(model.image)) == model.image
        self.residency.check_integrity()
        return stages.weight_bytes // PAGE if stages else 0

    def close(self) -> None:
        self.residency.close()
        self.rig.close()


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box(60)
    yield made
    made.close()


@pytest.fixture
def tight_box() -> Iterator[Box]:
    """Room for one model and a half."""
    made = Box(34)
    yield made
    made.close()


def test_the_next_model_is_there_when_its_turn_comes(box: Box) -> None:
    assert box.switch_in("a") == WEIGHT_PAGES
    box.residency.prefetch("b", "a")
    assert box.residency.missing_bytes("b") == 0
    assert box.switch_in("b") == 0
    assert box.switch_in("a") == 0


def test_as_much_comes_in_as_there_is_room_for(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    # 34 pages less the model, its null block's chunk, and a chunk to grow by.
    chunk = sum(len(span) for span in box.models["a"].kv.geometry.pages(0))
    there = box.weights("b").num_mapped_pages
    assert there == 34 - WEIGHT_PAGES - 2 * chunk
    assert box.switch_in("b") == WEIGHT_PAGES - there


def test_only_as_much_goes_as_must(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    assert box.switch_in("b") == WEIGHT_PAGES
    left = box.weights("a").num_mapped_pages
    assert 0 < left < WEIGHT_PAGES
    assert box.switch_in("a") == WEIGHT_PAGES - left


def test_idle_models_make_room_and_the_current_one_does_not(box: Box) -> None:
    box.switch_in("c")
    box.switch_in("b")
    box.switch_in("a")
    assert box.weights("c").is_resident
    short = WEIGHT_PAGES - box.weights("b").num_mapped_pages
    assert short > 0, "the least recently used gave way"
    box.residency.prefetch("b", "a")
    assert box.weights("a").is_resident
    assert box.weights("c").num_mapped_pages < WEIGHT_PAGES
    assert box.switch_in("b") == 0


def test_plans_change(box: Box) -> None:
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    box.residency.prefetch("c", "a")
    assert not box.weights("b").is_arriving
    assert box.switch_in("c") == 0
    box.switch_in("b")


def test_what_is_being_prefetched_gives_way_to_the_current_model(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    box.models["a"].num_wanted = box.models["a"].kv.geometry.num_blocks - 1
    box.residency.ensure_kv("a")
    assert box.models["a"].num_missing_blocks() == 8
    assert box.rig.pool.num_free < 3
    box.residency.check_integrity()
    box.models["a"].num_wanted = 0
    box.switch_in("b")


def test_a_model_that_goes_is_prefetched_no_more(box: Box) -> None:
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    box.residency.remove("b")
    assert not box.weights("b").is_arriving
    box.weights("b").evict()
    box.residency.check_integrity()
    box.residency.prefetch("c", "a")
    assert box.switch_in("c") == 0
