"""What a benchmark runs on: real sizes on a GPU, or small ones, on an emulated device or not."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import rig
from benchmarks.gpu.rig import Setting, arguments, setting_of
from gpupoold.config.sections import CUDA_RESERVE_BYTES
from gpupoold.worker.process import engine_arguments

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
MIB = 1 << 20


def setting(*options: str) -> Setting:
    told = ["--name", "a", "--out", "a.json", "--scratch", "/tmp", *options]
    return setting_of(arguments("A piece.").parse_args(told))


def device(one: Setting, num_bytes: int) -> dict[str, Any]:
    [found] = tomllib.loads(one.device(num_bytes, MIB))["device"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("options", "kind", "dtype", "slack_bytes"),
    [
        ((), "cuda", "auto", 1024 * MIB + CUDA_RESERVE_BYTES),
        (("--dry-run", "cuda"), "cuda", "auto", 32 * MIB + CUDA_RESERVE_BYTES),
        (("--dry-run",), "emulated", "float32", MIB),
    ],
)
def test_the_device_has_room_for_what_is_asked(
    options: tuple[str, ...], kind: str, dtype: str, slack_bytes: int
) -> None:
    one = setting(*options)
    assert device(one, 100 * MIB) == {"kind": kind, "memory": 100 * MIB + slack_bytes}
    assert one.dtype == dtype
    assert one.is_dry == bool(options)


def test_shapes_fit_what_they_run_on() -> None:
    real, small, tiny = setting(), setting("--dry-run", "cuda"), setting("--dry-run")
    for name in ("1B", "3B", "8B", "14B"):
        assert tiny.weight_bytes(name) < 32 * MIB < small.weight_bytes(name) < 256 * MIB
        assert real.weight_bytes(name) > 1000 * MIB
        assert small.shape(name).is_qwen2 == real.shape(name).is_qwen2
        assert small.shape(name).is_tied == real.shape(name).is_tied


def test_logs_of_a_piece_have_a_folder_of_its_own() -> None:
    assert setting().folder == Path("/tmp/daemons/a")


@pytest.mark.parametrize(
    ("starts_quickly", "is_dry"), [(True, False), (False, False), (True, True)]
)
def test_engines_are_not_compiled_where_steps_are_not_measured(
    starts_quickly: bool, is_dry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    @contextlib.contextmanager
    def daemon(config: str, folder: Path, timeout_s: float) -> Iterator[None]:
        seen.append(dict(os.environ))
        yield

    monkeypatch.setattr(rig, "private_daemon", daemon)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    one = setting(*(["--dry-run"] if is_dry else []))
    with one.daemon("", starts_quickly=starts_quickly):
        [environment] = seen
    is_quick = starts_quickly and not is_dry
    assert environment.get(BREAKABLE) == ("1" if is_quick else None)
    assert engine_arguments(environment) == ({"max_num_seqs": 64} if is_quick else {})
