"""``python -m gpupoold.frontend``: started by the daemon, never by hand."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from gpupoold.access.tls import Tls
from gpupoold.config.sections import BatchSettings
from gpupoold.frontend.grammar_checker.checker import fork_checker
from gpupoold.frontend.grammars import RunningChecker
from gpupoold.frontend.server import FrontendServer, FrontendSettings
from gpupoold.system.process import (
    FRONTEND_OOM_SCORE_ADJ,
    begin_child,
    raise_file_limit,
    raise_oom_score,
)


def parse_arguments(arguments: list[str] | None = None) -> FrontendSettings:
    """The settings named on the command line.

    Raises:
        SystemExit: an argument is missing or malformed.
    """
    parser = argparse.ArgumentParser(prog="gpupoold.frontend", description=__doc__)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--max-body-bytes", type=int, default=10_000_000)
    parser.add_argument("--max-live-requests", type=int, default=1024)
    parser.add_argument("--max-bytes-in-flight", type=int, default=256_000_000)
    parser.add_argument("--wait-comments-s", type=float, default=0.0)
    parser.add_argument("--traces-endpoint", default="")
    parser.add_argument("--traces-share", type=float, default=1.0)
    parser.add_argument("--refuses-at-end", type=int, default=0)
    parser.add_argument("--batches-folder", type=Path)
    parser.add_argument("--batches", type=BatchSettings.model_validate_json, default="{}")
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    found = parser.parse_args(arguments)
    return FrontendSettings(
        wire_fd=found.wire_fd,
        listen_fd=found.listen_fd,
        number=found.number,
        log_level=found.log_level,
        max_body_bytes=found.max_body_bytes,
        max_live_requests=found.max_live_requests,
        max_bytes_in_flight=found.max_bytes_in_flight,
        wait_comments_s=found.wait_comments_s,
        traces_endpoint=found.traces_endpoint,
        traces_share=found.traces_share,
        parent_pid=found.parent_pid,
        refuses_at_end=bool(found.refuses_at_end),
        tls=None if found.tls_cert is None else Tls(found.tls_cert, found.tls_key),
        batches=found.batches,
        batches_folder=found.batches_folder,
    )


async def _serve(settings: FrontendSettings, checker: RunningChecker) -> None:
    exit_status = 0
    try:
        await FrontendServer(settings, checker).run()
    except Exception:
        logging.getLogger(__name__).exception("the frontend failed")
        exit_status = 1
    logging.shutdown()
    # Tokenizer threads or a running import would delay an ordinary exit.
    os._exit(exit_status)


def main() -> None:
    """Run a frontend until the daemon stops the process."""
    settings = parse_arguments()
    begin_child(f"frontend-{settings.number}", settings.log_level, settings.parent_pid)
    raise_oom_score(FRONTEND_OOM_SCORE_ADJ)
    raise_file_limit()
    checker = fork_checker(settings.log_level)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(settings, checker))
    else:
        uvloop.run(_serve(settings, checker))


if __name__ == "__main__":
    main()
