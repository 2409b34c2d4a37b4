"""A frontend as the daemon's fork server starts the process, with vLLM imported before."""

from __future__ import annotations

from gpupoold.frontend import __main__ as frontend, preload


def main() -> None:
    """Run the frontend of this command line."""
    preload.preload("warning")
    frontend.main()


if __name__ == "__main__":
    main()
