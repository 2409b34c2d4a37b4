"""Entry point of the daemon: ``gpupoold`` and ``python -m gpupoold``."""

from __future__ import annotations

from gpupoold.system.interrupts import ended_by_interrupts


def main() -> None:
    with ended_by_interrupts():
        from gpupoold.service import main as run
    run()


if __name__ == "__main__":
    main()
