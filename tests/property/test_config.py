"""Settings as text are read as the same; a file that is heeded twice changes nothing again."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from gpupoold.config.keys import changes_between, settings_of, with_changes
from gpupoold.config.schema import Settings, parse_settings
from gpupoold.units import exact_duration, exact_size, parse_duration_s, parse_size_bytes

SIZES = st.one_of(
    st.integers(0, 2**45),
    st.builds(lambda n, unit: f"{n}{unit}", st.integers(0, 999), st.sampled_from(["MB", "GiB"])),
)
DURATIONS = st.one_of(
    st.floats(1e-7, 1e7, allow_nan=False),
    st.builds(lambda n, unit: f"{n}{unit}", st.integers(1, 999), st.sampled_from(["ms", "s", "m"])),
)
ROLES = st.sampled_from(["auto", "prefill", "decode", "mixed"])
DEVICES = st.lists(
    st.sampled_from([{"kind": "emulated"}, {"kind": "cuda"}, {"kind": "sim", "gpu": "A10"}]),
    min_size=1,
    max_size=3,
)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Parsed files, with some keys of most sections."""
    devices = draw(DEVICES)
    roles = ["mixed", *draw(st.lists(ROLES, min_size=len(devices) - 1, max_size=len(devices) - 1))]
    sections: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "server": {"port": st.integers(0, 65535), "max_body": st.integers(1, 2**40)},
        "memory": {
            "model_cache": SIZES,
            "kv_host": SIZES,
            "self_check_interval": st.integers(0, 99),
        },
        "scheduling": {
            "roles": st.sampled_from(["auto", roles]),
            "quota_max": DURATIONS,
            "policy": st.sampled_from(["gpupool", "static"]),
        },
        "security": {"allow_pickle": st.booleans()},
        "limits": {"stop_grace": DURATIONS, "max_live_requests": st.integers(1, 10**6)},
        "paths": {"model_dirs": st.lists(st.sampled_from(["/a", "/b"])), "log_dir": st.just("/l")},
        "log": {"level": st.sampled_from(["debug", "info"])},
    }
    none: dict[str, st.SearchStrategy[Any]] = {}
    optional = {name: st.fixed_dictionaries(none, optional=keys) for name, keys in sections.items()}
    some = st.fixed_dictionaries(none, optional=optional)
    return {"device": devices} | draw(some)


def settings() -> st.SearchStrategy[Settings]:
    return files().map(lambda raw: parse_settings(raw, "test"))


@given(settings(), settings())
def test_heeding_a_file_twice_changes_nothing(now: Settings, wanted: Settings) -> None:
    changes = changes_between(now, wanted)
    heeded = with_changes(now, wanted, changes)
    left = changes_between(heeded, wanted)
    assert {one.key for one in left} == {one.key for one in changes if one.effect == "restart"}
    assert all(one.effect == "restart" for one in left)
    assert with_changes(heeded, wanted, left) == heeded
    assert changes_between(now, now) == []
    raw = heeded.model_dump(mode="json", by_alias=True)
    assert parse_settings(_without_none(raw), "test") == heeded


@given(settings())
def test_settings_as_shown_are_read_as_the_same(shown: Settings) -> None:
    raw = _without_none(shown.model_dump(mode="json", by_alias=True))
    assert parse_settings(raw, "test") == shown
    assert len({one.key for one in settings_of(shown)}) == len(settings_of(shown))


@given(st.integers(0, 2**53))
def test_exact_sizes(num_bytes: int) -> None:
    assert parse_size_bytes(exact_size(num_bytes)) == num_bytes


@given(st.floats(1e-9, 1e9, allow_nan=False))
def test_exact_durations(seconds: float) -> None:
    assert parse_duration_s(exact_duration(seconds)) == seconds


def _without_none(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _without_none(value) for key, value in raw.items() if value is not None}
    return [_without_none(one) for one in raw] if isinstance(raw, list) else raw
