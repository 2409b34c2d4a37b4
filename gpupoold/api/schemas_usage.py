"""Bodies of the admin API for the use of the GPUs."""

from __future__ import annotations

from gpupoold.api.schemas import Body


class UseInfo(Body):
    """Use of a model with an API key; ``api_key`` and ``key_name`` are empty without one.

    ``gpu_s`` are seconds of steps times the device's GPUs. ``energy_j`` is the energy of the
    devices in these seconds, 0 without readings.
    """

    model: str
    api_key: str
    key_name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    gpu_s: float
    energy_j: float


class DeviceUse(Body):
    """Work of a device during ``seconds``: of steps, and of switches.

    ``energy_j`` is None without readings. ``kv_host_bytes`` of the host KV cache were in use, in
    slabs of ``kv_host_slab_bytes``: means over the time.
    """

    device: int
    seconds: float
    computing_s: float
    switching_s: float
    energy_j: float | None
    kv_host_bytes: int
    kv_host_slab_bytes: int

    @property
    def kv_host_fragmentation(self) -> float | None:
        """Share of the slabs without KV, None without slabs."""
        if not self.kv_host_slab_bytes:
            return None
        return max(0.0, 1 - self.kv_host_bytes / self.kv_host_slab_bytes)


class UsageInfo(Body):
    """Use since ``since`` (wall-clock seconds), which begins an hour, and work of the devices."""

    since: float
    uses: list[UseInfo]
    devices: list[DeviceUse]
