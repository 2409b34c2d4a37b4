"""Makes a fork server of the import server instead of one that imports vLLM.

On the path of the daemons of functional tests alone; see ``import_server.py``.
"""

from __future__ import annotations

import os
import sys

_MODULE = "gpupoold.system.fork_server"

if sys.orig_argv[1:3] == ["-m", _MODULE] and "GPUPOOL_TEST_IMPORT_SERVER" in os.environ:
    from tests.functional.import_server import become_forked

    become_forked(os.environ["GPUPOOL_TEST_IMPORT_SERVER"], sys.orig_argv[3:])
