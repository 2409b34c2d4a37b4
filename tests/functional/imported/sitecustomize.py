"""Makes a fork of the import server instead of a process that imports vLLM.

On the path of the processes of functional tests alone; see ``import_server.py``.
"""

from __future__ import annotations

import os
import sys

_MODULES = ("gpupoold.system.fork_server", "gpupoold.worker", "benchmarks.frontend_process")

if (
    sys.orig_argv[1:2] == ["-m"]
    and sys.orig_argv[2] in _MODULES
    and "GPUPOOL_TEST_IMPORT_SERVER" in os.environ
):
    from tests.functional.import_server import become_forked

    become_forked(os.environ["GPUPOOL_TEST_IMPORT_SERVER"], sys.orig_argv[2], sys.orig_argv[3:])
