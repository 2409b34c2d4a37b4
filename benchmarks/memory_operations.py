"""The stateful property test of the memory code, repeated up to a number of operations.

``python -m benchmarks.memory_operations 100000`` prints the number of operations made. A loop is
needed because Hypothesis ends some series early, so a single test makes fewer than requested.
"""

from __future__ import annotations

import sys
from random import Random

from hypothesis import seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.property.test_memory_machine import STEPS, MemoryMachine

# Hypothesis begins with the shortest series, so few series would be short series only.
_MIN_SERIES = 20
_num_operations = 0


class CountedMachine(MemoryMachine):
    """Counts what has been followed by a check of everything."""

    @invariant()
    def counted(self) -> None:
        """One more; the other invariants hold, or this run ends with an error."""
        global _num_operations
        _num_operations += 1


def main() -> int:
    """Run series until there are enough operations; an error is raised as pytest would."""
    asked = int(sys.argv[1])
    seeds = Random()
    while _num_operations < asked:
        examples = max(_MIN_SERIES, (asked - _num_operations) // STEPS)
        how = settings(MemoryMachine.TestCase.settings, max_examples=examples)
        machine = seed(seeds.getrandbits(64))(CountedMachine)
        run_state_machine_as_test(machine, settings=how)
    print(_num_operations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
