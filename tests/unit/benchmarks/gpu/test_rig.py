"""How the GPU's benchmarks start their daemons."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import rig
from benchmarks.gpu.rig import arguments, setting_of
from gpupoold.instance.environment import engine_arguments

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


@pytest.mark.parametrize(
    ("starts_quickly", "is_dry"), [(True, False), (False, False), (True, True)]
)
def test_engines_are_not_compiled_where_steps_are_not_measured(
    starts_quickly: bool, is_dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    @contextlib.contextmanager
    def daemon(config: str, folder: Path, timeout_s: float) -> Iterator[None]:
        seen.append(dict(os.environ))
        yield

    monkeypatch.setattr(rig, "private_daemon", daemon)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = ["--name", "a", "--out", str(tmp_path / "out.json"), "--scratch", str(tmp_path)]
    setting = setting_of(
        arguments("A test.").parse_args([*words, "--dry-run"] if is_dry else words)
    )
    with setting.daemon("", starts_quickly=starts_quickly):
        [environment] = seen
    is_quick = starts_quickly and not is_dry
    assert environment.get(BREAKABLE) == ("1" if is_quick else None)
    assert engine_arguments(environment) == ({"max_num_seqs": 64} if is_quick else {})
