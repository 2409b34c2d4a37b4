"""``python -m tests.syscall_faults 0|1 [SCENARIO ...]``: the results as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from tests.syscall_faults.injector import run_all
from tests.syscall_faults.scenarios import SCENARIOS


def main() -> None:
    """Run scenarios with every fault."""
    logging.disable()
    is_whole, *names = sys.argv[1:]
    results = {
        name: asyncio.run(run_all(SCENARIOS[name], is_whole=is_whole == "1"))
        for name in names or SCENARIOS
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
