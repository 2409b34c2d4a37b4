"""``python -m gpupoold.frontend``: started by the daemon, never by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os

from gpupoold.config.sections import FrontendSettings
from gpupoold.frontend.grammar_checker.checker import fork_checker
from gpupoold.frontend.grammars import RunningChecker
from gpupoold.frontend.server import FrontendServer
from gpupoold.system.process import (
    FRONTEND_OOM_SCORE_ADJ,
    begin_child,
    raise_file_limit,
    raise_oom_score,
)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpupoold.frontend", description=__doc__)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--settings", type=_settings, required=True)
    return parser


def _settings(text: str) -> FrontendSettings:
    return FrontendSettings.model_validate(json.loads(text))


async def _serve(started: argparse.Namespace, checker: RunningChecker) -> None:
    exit_status = 0
    try:
        await FrontendServer(started.settings, started.wire_fd, started.listen_fd, checker).run()
    except Exception:
        logging.getLogger(__name__).exception("the frontend failed")
        exit_status = 1
    logging.shutdown()
    # Tokenizer threads or a running import would delay an ordinary exit.
    os._exit(exit_status)


def main() -> None:
    started = argument_parser().parse_args()
    settings: FrontendSettings = started.settings
    begin_child(f"frontend-{settings.number}", settings.log_level, started.parent_pid)
    raise_oom_score(FRONTEND_OOM_SCORE_ADJ)
    raise_file_limit()
    checker = fork_checker(settings.log_level)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(started, checker))
    else:
        uvloop.run(_serve(started, checker))


if __name__ == "__main__":
    main()
