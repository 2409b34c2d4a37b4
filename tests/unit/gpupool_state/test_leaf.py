"""The package is a leaf: it may only load the standard library, aiosqlite and the domain."""

from __future__ import annotations

import os
import subprocess
import sys

SHOW = """
import sys
before = set(sys.modules)
import gpupool_state
print(*{name for name in set(sys.modules) - before if name != "sitecustomize"})
"""


def test_importing_the_package_loads_nothing_else() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, text=True, capture_output=True, check=True
    )
    loaded = set(shown.stdout.split())
    outside = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    own = {name for name in outside if name.partition(".")[0] in ("gpupool_state", "aiosqlite")}
    assert outside - own <= {
        "gpupoold",
        "gpupoold.api_keys",
        "gpupoold.domain",
        "gpupoold.durations",
        "gpupoold.event_kinds",
        "gpupoold.files",
        "gpupoold.errors",
        "gpupoold.units",
    }
