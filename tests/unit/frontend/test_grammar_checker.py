"""The checker's children may end as they like: each end is a verdict, and the checker goes on."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import pytest

from gpupoold.frontend.grammars import GrammarCheck, GrammarVerdict
from gpupoold.wire.channel import BlockingChannel
from tests.conftest import PYTHON_PATH
from tests.unit.frontend.test_grammar_vetting import LOADED, MODEL


class Trials(types.ModuleType):
    """What a child does is the constraint: a signal it sends itself, or one of some words."""

    class Prepared:
        def __init__(self, check: GrammarCheck) -> None:
            if check.mount_id == 0:
                raise OSError("no tokenizer")

    @staticmethod
    def try_grammar(_: object, check: GrammarCheck) -> GrammarVerdict:
        word = check.constraint.decode()
        if word == "hang":
            time.sleep(60)
        elif word == "spin":
            resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
            while True:
                pass
        elif word == "raise":
            raise ValueError
        elif word != "accept":
            os.kill(os.getpid(), signal.Signals[word])
        return GrammarVerdict(check.check_id, "accepted", "xgrammar")


_CHECKER = """
import os, socket, sys
from gpupoold.frontend.grammar_checker import checker
from tests.unit.frontend.test_grammar_checker import Trials
checker.preload = lambda _: None
checker.CHECK_TIMEOUT_S = 1.0
sys.modules["gpupoold.frontend.grammar_checker.trial"] = Trials("trial")
checker.run(socket.socket(fileno=int(sys.argv[1])), "error", os.getppid())
"""


@pytest.fixture(scope="module")
def channel() -> Iterator[BlockingChannel[GrammarVerdict]]:
    """To a checker, which ends with the channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", _CHECKER, str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
    running: BlockingChannel[GrammarVerdict] = BlockingChannel(ours, GrammarVerdict)
    yield running
    running.close()
    assert process.wait(10) == 0


def verdict(
    channel: BlockingChannel[GrammarVerdict], word: str, mount_id: int = 1
) -> GrammarVerdict:
    channel.send(GrammarCheck(7, mount_id, MODEL, LOADED, word.encode()))
    answer = channel.receive(30)
    assert answer is not None
    assert answer.check_id == 7
    return answer


@pytest.mark.parametrize(
    ("word", "outcome", "reason"),
    [
        ("accept", "accepted", ""),
        ("SIGSEGV", "refused", "ends the compiler (SIGSEGV)"),
        ("SIGABRT", "refused", "ends the compiler (SIGABRT)"),
        ("SIGXCPU", "refused", "more CPU time"),
        ("raise", "refused", "ends the compiler"),
        ("SIGKILL", "unknown", "no memory"),
        ("hang", "unknown", "within"),
    ],
)
def test_end(
    channel: BlockingChannel[GrammarVerdict], word: str, outcome: str, reason: str
) -> None:
    found = verdict(channel, word)
    assert found.outcome == outcome
    assert reason in found.reason
    assert verdict(channel, "accept").outcome == "accepted"


def test_model_that_cannot_be_prepared(channel: BlockingChannel[GrammarVerdict]) -> None:
    assert verdict(channel, "accept", mount_id=0).outcome == "unknown"
    assert verdict(channel, "accept").outcome == "accepted"


def test_endless_child_is_ended(channel: BlockingChannel[GrammarVerdict]) -> None:
    found = verdict(channel, "spin")
    assert found.outcome in ("refused", "unknown")  # whichever limit comes first
    assert verdict(channel, "accept").outcome == "accepted"


def test_several_at_once(channel: BlockingChannel[GrammarVerdict]) -> None:
    """A slow one does not hold the others up."""
    words = ["hang", "accept", "SIGSEGV", "accept"]
    for number, word in enumerate(words):
        channel.send(GrammarCheck(number, 1, MODEL, LOADED, word.encode()))
    answers = [channel.receive(30) for _ in words]
    assert [one.check_id for one in answers if one is not None][-1] == 0
    assert {one.check_id for one in answers if one is not None} == {0, 1, 2, 3}
