"""``run``: the answer on stdout, everything else on stderr."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from gpupool_cli.run import AnswerTiming, ChatPiece, ChatWait, _sse_data, wait_text
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli, ProcessCli, command
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def test_the_answer_is_all_of_stdout(daemon: FakeDaemon, process_cli: ProcessCli) -> None:
    result = process_cli("run", "m", "Hi", "--max-tokens", "8", "--system", "Be kind")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "Hello, wörld!\n"
    (asked,) = daemon.chats
    assert asked["model"] == "m"
    assert asked["max_completion_tokens"] == 8
    assert asked["messages"] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hi"},
    ]


def test_the_prompt_comes_from_stdin(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("run", "m", "-", stdin="from a pipe").exit_code == 0
    assert daemon.chats[0]["messages"] == [{"role": "user", "content": "from a pipe"}]
    assert "max_completion_tokens" not in daemon.chats[0]


def test_an_empty_prompt_is_a_usage_error(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("run", "m", "-", stdin=" \n").exit_code == 2


def test_pieces_are_written_as_they_come(daemon: FakeDaemon, environment: dict[str, str]) -> None:
    daemon.chat_pause_s = 1.0
    with subprocess.Popen(
        command("run", "m", "Hi"), env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"Hello"
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("line", "wait"),
    [
        (b": gpupool waiting place=3 estimate_s=4.2", ChatWait(3, 4.2)),
        (b": gpupool waiting place=12", ChatWait(12, None)),
        (b": gpupool waiting", ChatWait(None, None)),
        (b": gpupool waiting place=-1", None),
        (b": gpupool waiting place=12345678901234567890", None),
        (b": ping", None),
    ],
)
def test_comments_of_waiting_streams_are_read(line: bytes, wait: ChatWait | None) -> None:
    found = list(_sse_data(iter([line, b"", b"data: {}", b""])))
    assert found == ([b"{}"] if wait is None else [wait, b"{}"])


def test_a_wait_is_told_in_words() -> None:
    assert wait_text(ChatWait(3, 4.25)) == "waiting, place 3, about 4.25s"
    assert wait_text(ChatWait(None, None)) == "waiting"


def test_verbose_tells_times_on_stderr(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.chat_pause_s = 0.01
    reasoning = json.dumps({"choices": [{"delta": {"reasoning": "hm "}}]})
    daemon.chat_chunks.insert(1, reasoning)
    result = cli("run", "m", "Hi", "--verbose")
    assert result.stdout == "Hello, wörld!\n"
    assert re.fullmatch(r"hm ttft [\d.]+m?s, 3 tokens, [\d.]+ tokens/s\n", result.stderr)


def test_the_whole_answer_is_one_document(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.chat_chunks.insert(1, json.dumps({"choices": [{"delta": {"reasoning": "hm "}}]}))
    answer = json.loads(cli("run", "m", "Hi", "--json").stdout)
    assert answer["text"] == "Hello, wörld!"
    assert answer["reasoning"] == "hm "
    assert answer["num_tokens"] == 3
    assert answer["ttft_s"] > 0


def test_line_separators_inside_a_piece_survive(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.chat_chunks = samples.chat_chunks("a\u2028b\u0085c\x0cd\n")
    assert cli("run", "m", "Hi").stdout == "a\u2028b\u0085c\x0cd\n"


@pytest.mark.parametrize(
    ("http_status", "exit_code"),
    [(400, 2), (401, 5), (404, 4), (429, 1), (500, 1), (503, 1), (504, 6)],
)
def test_errors_of_the_http_api(
    daemon: FakeDaemon, cli: Cli, http_status: int, exit_code: int
) -> None:
    daemon.chat_status = http_status
    result = cli("run", "m", "Hi")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("error: the model is busy\n")


def test_an_error_in_the_middle_of_an_answer(daemon: FakeDaemon, cli: Cli) -> None:
    error = json.dumps({"error": {"message": "the engine died", "code": 500}})
    daemon.chat_chunks = [*samples.chat_chunks("Hel")[:2], error, "[DONE]"]
    result = cli("run", "m", "Hi")
    assert result.exit_code == 1
    assert result.stdout == "Hel"
    assert "error: the engine died\n" in result.stderr


def test_an_answer_that_breaks_off(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.chat_chunks = samples.chat_chunks("Hel")[:2]
    result = cli("run", "m", "Hi")
    assert result.exit_code == 1
    assert "ended early" in result.stderr


def test_silence_times_out(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.chat_pause_s = 5.0
    result = cli("run", "m", "Hi", "--timeout", "200ms")
    assert result.exit_code == 6
    assert "--timeout" in result.stderr


def test_a_bad_timeout_names_the_option(cli: Cli) -> None:
    result = cli("run", "m", "Hi", "--timeout", "forever")
    assert result.exit_code == 2
    assert "'--timeout'" in result.stderr


def test_timing_counts_tokens_after_the_first() -> None:
    timing = AnswerTiming(started_s=10.0)
    assert timing.summary() == "no tokens"
    timing.note(ChatPiece(), 10.2)
    timing.note(ChatPiece("a"), 10.5)
    assert timing.summary() == "ttft 500ms, 1 tokens"
    timing.note(ChatPiece("bc"), 11.5)
    timing.note(ChatPiece(num_tokens=5), 12.0)
    assert timing.summary() == "ttft 500ms, 5 tokens, 4.0 tokens/s"
