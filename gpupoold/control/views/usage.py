"""The use of the GPUs for the admin API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gpupool_state import DeviceMinuteRow, UsageRow
from gpupoold.api.schemas_usage import DeviceUse, UsageInfo, UseInfo


def usage_info(
    since: float,
    uses: Iterable[UsageRow],
    devices: Iterable[DeviceMinuteRow],
    key_names: Mapping[str, str],
) -> UsageInfo:
    """Return the body for sums of the history; ``key_names`` are by the keys' public ids."""
    rows = [asdict(one) for one in uses]
    return UsageInfo(
        since=min((row.pop("hour_at") for row in rows), default=since),
        uses=[UseInfo(**row, key_name=key_names.get(row["api_key"], "")) for row in rows],
        devices=[DeviceUse(**_without_time(one)) for one in devices],
    )


def _without_time(row: DeviceMinuteRow) -> dict[str, Any]:
    values = asdict(row)
    del values["minute_at"]
    return values
