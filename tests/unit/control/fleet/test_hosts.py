"""Memory that a worker keeps at the end of an engine."""

from __future__ import annotations

import pytest

from gpupoold.control.fleet.states import HostEvent, Hosts
from gpupoold.wire.messages import EngineMemory

FIRST_BYTES, OTHER_BYTES = 60, 10


def hosts_with(*others: str) -> Hosts:
    """A worker whose first engine is charged with the libraries too, and other engines."""
    hosts = Hosts()
    for name, num_bytes in (("first", FIRST_BYTES), *((one, OTHER_BYTES) for one in others)):
        host = hosts.of(name, 0)
        host.move(HostEvent.LOAD)
        host.loaded("digest", EngineMemory(num_bytes, num_bytes), has_snapshot=True)
        hosts.loaded(name, 0)
    return hosts


@pytest.mark.parametrize(
    ("others", "freed_bytes", "kept_bytes"),
    [
        ((), 20, 40),
        (("a", "b"), 20, 40),
        pytest.param(("a", "b"), 0, FIRST_BYTES - OTHER_BYTES, id="freed-later"),
        pytest.param((), 100, 0, id="freed-more"),
    ],
)
def test_the_first_engines_end_leaves_the_libraries(
    others: tuple[str, ...], freed_bytes: int, kept_bytes: int
) -> None:
    hosts = hosts_with(*others)
    hosts.freed("first", 0, freed_bytes)
    assert hosts.kept_bytes(0) == kept_bytes
    hosts.freed("a", 0, 0)
    assert hosts.kept_bytes(0) == kept_bytes
    hosts.lose_worker(0)
    assert hosts.kept_bytes(0) == 0


@pytest.mark.parametrize(("engine_of", "kept_bytes"), [("first", 0), ("", 50)])
def test_a_kept_engine_is_counted_with_the_model_that_takes_it_over(
    engine_of: str, kept_bytes: int
) -> None:
    """Or as freed, if the worker has closed it for another load."""
    hosts = hosts_with("a")
    hosts.keep_engine("first", 0)
    host = hosts.of("first", 0)
    host.move(HostEvent.UNLOAD)
    host.move(HostEvent.UNLOADED)
    hosts.loaded("b", 0, engine_of)
    assert hosts.kept_bytes(0) == kept_bytes
    assert hosts.first_on(0) == ("b" if engine_of else "")
