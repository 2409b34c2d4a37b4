"""The use of the GPUs for the admin API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpupool_state import DeviceMinuteRow, UsageRow
from gpupoold.api.schemas_usage import UsageInfo, UseInfo


def usage_info(
    since: float,
    uses: Iterable[UsageRow],
    devices: Iterable[DeviceMinuteRow],
    key_names: Mapping[str, str],
) -> UsageInfo:
    """Return the body for sums of the history; ``key_names`` are by the keys' public ids."""
    rows = [dict(vars(one)) for one in uses]
    return UsageInfo(
        since=min((row.pop("hour_at") for row in rows), default=since),
        uses=[UseInfo(**row, key_name=key_names.get(row["api_key"], "")) for row in rows],
        devices=[*devices],
    )
