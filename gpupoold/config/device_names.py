"""Names of devices: the short form in the configuration, and GPUs visible to CUDA. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpupoold.latency.errors import LatencyError
from gpupoold.latency.hardware import hardware

_SIM_DEVICES = re.compile(r"(?:(?P<count>[1-9]\d{0,2})x)?(?P<gpu>[A-Za-z][\w .-]*)")


def named_devices(names: object, has_tables: bool) -> list[dict[str, object]]:
    """Convert ``devices``, the short form, to the tables of ``[[device]]``.

    Raises:
        ValueError: not a list of known names, or ``has_tables``, when the file has both forms.
    """
    if has_tables:
        raise ValueError("write either devices or [[device]], not both")
    if not isinstance(names, list) or not names:
        raise ValueError('write a list such as ["cuda:0", "cuda:1"] or ["sim:16xH800"]')
    return [device for name in names for device in _named_device(name)]


def check_gpu(kind: str, gpu: str | None) -> None:
    """Check that devices of kind ``sim`` name a known GPU, and other devices no GPU.

    Raises:
        ValueError: the check fails.
    """
    if kind != "sim":
        if gpu is not None:
            raise ValueError('gpu is for kind = "sim" only')
        return
    if gpu is None:
        raise ValueError('kind = "sim" needs gpu, such as "H800"')
    try:
        hardware(gpu)
    except LatencyError as error:
        raise ValueError(str(error)) from error


def visible_entry(index: int, environment: Mapping[str, str]) -> str | None:
    """Return NVML's index or (the beginning of) a UUID for the CUDA device ``index``. Pure.

    Returns None if ``CUDA_VISIBLE_DEVICES`` has no such device.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return entries[index] if index < len(entries) else None


def _named_device(name: object) -> list[dict[str, object]]:
    kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind == "cuda" and rest.isdecimal():
        return [{"kind": kind, "index": int(rest)}]
    if kind in ("cuda", "emulated") and name == kind:
        return [{"kind": kind}]
    match = _SIM_DEVICES.fullmatch(rest)
    if kind != "sim" or match is None:
        raise ValueError(
            f'{name!r} is not a device: write "cuda", "cuda:0", "emulated", "sim:H800" or '
            '"sim:16xH800"'
        )
    check_gpu(kind, match["gpu"])
    return [{"kind": kind, "gpu": match["gpu"]} for _ in range(int(match["count"] or 1))]
