"""``events`` and ``logs``, once and followed."""

from __future__ import annotations

import json
import signal
import subprocess

from gpupool_cli import output
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli, command
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

When = output.time_text(samples.AT)


def _follow(args: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def test_events_are_the_latest_in_order(daemon: FakeDaemon, cli: Cli) -> None:
    for number in range(1, 5):
        daemon.tell(f"event {number}", level="warning" if number == 4 else "info")
    assert cli("events", "-n", "2").stdout.splitlines() == [
        f"{When} info    worker worker-0 event 3",
        f"{When} warning worker worker-0 event 4",
    ]
    assert [item["id"] for item in json.loads(cli("events", "--json").stdout)] == [1, 2, 3, 4]


def test_no_events(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("events").stdout == ""
    assert cli("events", "--json").stdout == "[]\n"


def test_followed_events_are_lines_of_json_until_interrupted(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    daemon.tell("past")
    with _follow(["events", "-f", "--json"], environment) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["message"] == "past"
        daemon.tell("new \u2028 line separator")
        assert json.loads(process.stdout.readline())["message"] == "new \u2028 line separator"
        process.send_signal(signal.SIGINT)
        rest, talk = process.communicate(timeout=20)
    assert (process.returncode, rest, talk) == (130, "", "")


def test_logs(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("logs", "--lines", "2").stdout == "gpupoold | two\ngpupoold | three\n"
    written = json.loads(cli("logs", "--lines", "2", "--json").stdout)
    assert written == [{"process": "gpupoold", "line": line} for line in ("two", "three")]
    result = cli("logs", "--process", "nobody")
    assert (result.exit_code, result.stdout) == (1, "")


def test_followed_logs_end_quietly_when_their_reader_does(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    with _follow(["logs", "--follow", "--lines", "1"], environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "gpupoold | three\n"
        process.stdout.close()
        daemon.log_lines += ["four", "five"]
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_followed_logs_are_lines_of_json(daemon: FakeDaemon, environment: dict[str, str]) -> None:
    with _follow(["logs", "--follow", "--lines", "1", "--json"], environment) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["line"] == "three"
        daemon.log_lines.append("four")
        assert json.loads(process.stdout.readline())["line"] == "four"
        process.kill()


def test_a_daemon_that_stops_ends_the_stream(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    with _follow(["logs", "-f", "--lines", "1"], environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "gpupoold | three\n"
        daemon.stop_admin()
        _, talk = process.communicate(timeout=20)
    assert process.returncode in (0, 1)
    assert "Traceback" not in talk
