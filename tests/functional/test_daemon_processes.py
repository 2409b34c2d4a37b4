"""Processes that die: the daemon, its worker, its frontends, each in the middle of work."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupoold.latency.models import StoredLatency
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    QWEN2,
    QWEN3,
    Answer,
    Background,
    Restartable,
    admin_http,
    all_gone,
    api_client,
    ask,
    child,
    child_env,
    emulated_config,
    eventually,
    frontend,
    ps,
    until,
)
from tests.functional.terminal import Terminal
from tests.support.programs import run_daemon

STOP_GRACE_S = 1.5
GRACE_S = 15.0


@pytest.fixture(scope="module")
def restartable(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Restartable]:
    """Two models on a daemon that tests kill."""
    models = {name: tiny_models[name] for name in (LLAMA, QWEN2)}
    config = emulated_config(device_bytes) + f'[limits]\nstop_grace = "{STOP_GRACE_S:g}s"\n'
    daemons = Restartable(config, tmp_path_factory.mktemp("restartable"), models)
    yield daemons
    daemons.close()


@pytest.fixture
def daemon(restartable: Restartable) -> PrivateDaemon:
    """The daemon, started anew if the test before ended it; its models are ready."""
    return restartable.running()


@pytest.fixture
async def api(daemon: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    async with api_client(daemon.http_url) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    """First answers of the module by model; later processes must give the same."""
    return {}


def measured(daemon: PrivateDaemon) -> list[StoredLatency | None]:
    """What is known of each model's latency, and since when."""
    with daemon.client() as client:
        return [model.latency for model in client.models()]


async def same_answers(daemon: PrivateDaemon, expected: dict[str, Answer]) -> None:
    async with api_client(daemon.http_url) as api:
        for model in (LLAMA, QWEN2):
            answer = await ask(api, model, "who are you?")
            assert expected.setdefault(model, answer) == answer


def models_ready(daemon: PrivateDaemon) -> bool:
    return {row.state for row in ps(daemon).models} == {"ready"}


def listed_state(daemon: PrivateDaemon, model: str) -> str:
    return str(httpx.get(f"{daemon.http_url}/v1/models/{model}").json()["status"])


class TestWorker:
    @pytest.mark.slow
    async def test_killed(
        self, daemon: PrivateDaemon, api: AsyncOpenAI, expected: dict[str, Answer]
    ) -> None:
        await same_answers(daemon, expected)
        jobs = [(name, f"interrupted {n}", 300) for name in (LLAMA, QWEN2) for n in range(2)]
        alone = [await ask(api, *job) for job in jobs]
        streams = [Background(api, *job) for job in jobs]
        for stream in streams:
            await stream.started()
        killed = child(daemon, "worker")
        killed.kill()
        await eventually(lambda: listed_state(daemon, LLAMA) == "loading")
        with pytest.raises(openai.InternalServerError, match="loading") as caught:
            await ask(api, LLAMA, "too early")
        assert caught.value.response.headers["retry-after"]
        assert [await stream.finished() for stream in streams] == alone
        await eventually(lambda: models_ready(daemon), 60)
        await same_answers(daemon, expected)
        assert child(daemon, "worker").pid != killed.pid
        with daemon.client() as client:
            kinds = [event.kind for event in client.events()]
        assert kinds.index("worker_down") < len(kinds) - 1 - kinds[::-1].index("worker_ready")


class TestFrontends:
    @pytest.mark.slow
    async def test_all_killed(self, daemon: PrivateDaemon, expected: dict[str, Answer]) -> None:
        await same_answers(daemon, expected)
        async with api_client(daemon.http_url) as api:
            stream = Background(api, LLAMA, "interrupted", LONG)
            await stream.started()
            for number in range(2):
                frontend(daemon, number).kill()
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                await stream.finished()
        await eventually(lambda: not ps(daemon).requests, 5)
        # With none left a connection made now waits in the socket until one accepts it.
        body = {"model": LLAMA, "prompt": "who are you?", "max_tokens": 1}
        statuses: list[int] = []

        async def answered() -> bool:
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await http.post(f"{daemon.http_url}/v1/completions", json=body)
            statuses.append(answer.status_code)
            return answer.status_code == 200

        await eventually(answered, 60)
        assert set(statuses) <= {200, 503}
        await same_answers(daemon, expected)


class TestDaemon:
    async def test_killed(
        self, restartable: Restartable, daemon: PrivateDaemon, expected: dict[str, Answer]
    ) -> None:
        await same_answers(daemon, expected)
        latencies = measured(daemon)
        processes = descendants(daemon)
        assert {row.pid for row in ps(daemon).devices} < {process.pid for process in processes}
        with Terminal(daemon) as terminal:
            terminal.until("5 Events")
            async with api_client(daemon.http_url) as api:
                stream = Background(api, LLAMA, "interrupted", LONG)
                await stream.started()
                daemon.process.kill()
                assert all_gone(processes, 2)
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    await stream.finished()
            daemon.process.wait()
            terminal.until("connection lost, trying again")
            # Not in a thread: the daemon would die with it.
            await same_answers(restartable.running(), expected)
            terminal.until("the daemon has started again")
            terminal.press("q")
            assert terminal.process.wait(20) == 0
            assert "Traceback" not in terminal.since(0)
        # Kept, and not measured again, but for what a busy machine had spoilt.
        for before, after in zip(latencies, measured(restartable.running()), strict=True):
            assert after == before or before is None or before.model() is None

    async def test_terminated_in_the_middle_of_work(
        self, restartable: Restartable, daemon: PrivateDaemon, tiny_models: dict[str, Path]
    ) -> None:
        processes = descendants(daemon)
        async with api_client(daemon.http_url) as api:
            expected = await ask(api, QWEN2, "interrupted", 48)
            # More than the seconds that open streams are given.
            endless = [Background(api, LLAMA, f"endless {i}", LONG) for i in range(4)]
            for stream in endless:
                await stream.started()
            short = Background(api, QWEN2, "interrupted", 48)
            await short.started()
            request = {"name": "late", "source": str(tiny_models[QWEN3]), **LOAD_OPTIONS}
            with (
                admin_http(daemon) as admin,
                admin.stream("POST", "/models", json=request) as adding,
            ):
                lines = adding.iter_lines()
                while json.loads(next(lines))["stage"] != "load":
                    pass
                daemon.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(daemon.process.wait, GRACE_S)
                told = json.loads(list(lines)[-1])
            outcomes = await asyncio.gather(
                *(stream.finished() for stream in (short, *endless)), return_exceptions=True
            )
        # Unless the load has kept it from its turn until the grace was over.
        assert outcomes[0] == expected or isinstance(outcomes[0], openai.APIError)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert {str(error) for error in errors} <= {"the server is stopping"}
        assert daemon.process.returncode == 0
        assert all_gone(processes, 0)
        assert not daemon.socket_path.exists()
        assert "Traceback" not in daemon.log_path.read_text()
        if told["stage"] == "ready":  # the load has ended within the grace
            with restartable.running({"late"}).client() as client:
                client.remove_model("late")
        restartable.running()

    @pytest.mark.slow
    def test_a_second_one_on_the_same_folder(self, daemon: PrivateDaemon) -> None:
        config = daemon.log_path.parent / "gpupool.toml"
        done = run_gpupoold(config)
        assert done.returncode == 5
        assert f"pid {daemon.process.pid}" in done.stderr
        assert models_ready(daemon)

    def test_a_second_one_with_the_same_socket(self, daemon: PrivateDaemon, tmp_path: Path) -> None:
        paths = {"state_dir": tmp_path / "state", "runtime_dir": daemon.socket_path.parent}
        done = run_gpupoold(write_config(tmp_path, "[server]\nport = 0\n", **paths))
        assert done.returncode == 5
        assert str(daemon.socket_path) in done.stderr
        assert models_ready(daemon)

    def test_would_be_killed_last_for_want_of_memory(self, daemon: PrivateDaemon) -> None:
        def score(process: psutil.Process) -> int:
            return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())

        own = score(psutil.Process(daemon.process.pid))
        assert score(child(daemon, "worker")) == max(own, 500)
        assert score(frontend(daemon, 0)) == max(own, 200)
        # If the kernel ended the fork server, all its forks would end too.
        assert score(child(daemon, "system.fork_server")) == own

    def test_is_light(self, daemon: PrivateDaemon) -> None:
        maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "/vllm/" not in maps
        assert psutil.Process(daemon.process.pid).memory_info().rss < 100_000_000
        with daemon.client() as client:
            assert client.status().rss_bytes < 100_000_000


class TestStarting:
    def test_interrupted(self, tmp_path: Path) -> None:
        """Ctrl-C in the first seconds: the engine is still being imported."""
        config = write_config(tmp_path, "[server]\nport = 0\n" + emulated_config(16 << 20))
        process = subprocess.Popen(
            [sys.executable, "-m", "gpupoold", "--config", str(config)],
            env=child_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        me = psutil.Process(process.pid)
        until(lambda: len(me.children()) == 1)
        processes = me.children(recursive=True)
        until(lambda: all("-m" in p.cmdline() for p in processes))
        process.send_signal(signal.SIGINT)
        assert process.wait(GRACE_S) == 0
        assert all_gone(processes, 0)

    def test_a_port_in_use(self, tmp_path: Path, daemon: PrivateDaemon) -> None:
        port = daemon.http_url.rsplit(":", 1)[1]
        done = run_gpupoold(write_config(tmp_path, f"[server]\nport = {port}\n"))
        assert done.returncode == 1
        assert f"127.0.0.1:{port}" in done.stderr
        assert "server.port" in done.stderr

    def test_an_unknown_key(self, tmp_path: Path) -> None:
        config = write_config(tmp_path, "[memory]\nmodel_cash = 1\n")
        done = run_gpupoold(config)
        assert done.returncode == 2
        line = len(config.read_text().splitlines())
        assert f"{config}: line {line}: memory.model_cash: unknown key" in done.stderr
        assert "'model_cache'" in done.stderr

    def test_no_such_config(self, tmp_path: Path) -> None:
        done = run_gpupoold(tmp_path / "nowhere.toml")
        assert done.returncode == 2
        assert "nowhere.toml" in done.stderr

    def test_a_state_folder_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        state_dir = tmp_path / "file" / "state"
        done = run_gpupoold(write_config(tmp_path, "", state_dir=state_dir))
        assert done.returncode == 1
        assert str(state_dir) in done.stderr
        assert "Not a directory" in done.stderr

    def test_a_socket_path_that_is_too_long(self, tmp_path: Path) -> None:
        runtime_dir = tmp_path / ("long" * 30)
        config = write_config(tmp_path, "[server]\nport = 0\n", runtime_dir=runtime_dir)
        done = run_gpupoold(config)
        assert done.returncode == 2
        assert "line 3: paths.runtime_dir: the admin socket" in done.stderr
        assert "choose a shorter folder" in done.stderr

    def test_a_runtime_folder_that_others_can_write_to(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run").chmod(0o777)
        done = run_gpupoold(write_config(tmp_path, "[server]\nport = 0\n"))
        assert done.returncode == 5
        assert f"{tmp_path}/run, is writable by other users" in done.stderr
        assert f"hint: chmod go-w {tmp_path}/run" in done.stderr

    def test_a_database_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "gpupool.db").write_text("this is not a database " * 100)
        done = run_gpupoold(write_config(tmp_path, "[server]\nport = 0\n"))
        assert done.returncode == 1
        assert "gpupool.db" in done.stderr


def write_config(folder: Path, text: str, **paths: Path) -> Path:
    """A configuration with its folders below ``folder``, unless others are given."""
    places = {"state_dir": folder / "state", "runtime_dir": folder / "run"} | paths
    lines = [f'{name} = "{path}"' for name, path in places.items()]
    config = folder / "gpupool.toml"
    config.write_text("\n".join(["[paths]", *lines, "model_dirs = []", text]))
    return config


def run_gpupoold(config: Path) -> subprocess.CompletedProcess[str]:
    """A daemon that must end by itself, with one clear line and no traceback."""
    done = run_daemon(["--config", str(config)], child_env())
    assert "gpupoold: " in done.stderr
    assert "Traceback" not in done.stderr
    return done
