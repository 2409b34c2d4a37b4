"""The processor that the tests run on."""

from __future__ import annotations

from pathlib import Path

HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
"""With AMX vLLM's CPU build has other kernels, some of which refuse float32."""
