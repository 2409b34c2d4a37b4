"""What the tests of the whole daemon do to it: ask, run the command line, look for leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import AsyncOpenAI, AsyncStream
from openai.types import Completion

from benchmarks import private_daemon as daemons
from benchmarks.bench.rig import emulated_config as emulated_config, weight_bytes as weight_bytes
from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants, module_of
from gpupoold.api.schemas import DeviceInfo, ModelUsage, Ps, RoleName
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from tests.conftest import PYTHON_PATH
from tests.functional.known_latency import prepare_state
from tests.support.programs import run_command, start_daemon

MODELS = ("tiny-llama", "tiny-mixtral", "tiny-qwen2", "tiny-qwen3")
LLAMA, MIXTRAL, QWEN2, QWEN3 = MODELS
MAX_LEN = 1024
# About 1.4 s of streaming: long enough to do things meanwhile.
LONG = 600
SIM_SHAPE = "Qwen2.5-7B"
# Most conditions ask the daemon, which takes 10 ms of a core.
_POLL_S = 0.05
LOAD_OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_LEN}


@contextlib.contextmanager
def private_daemon(
    config: str, folder: Path | None = None, *, frontends: int = 1, server: str = ""
) -> Iterator[PrivateDaemon]:
    """A daemon as ``benchmarks.private_daemon`` has, which does not profile models on emulated
    devices.

    A second frontend takes half a second of a core, and 0.1 to 0.3 s for each model.
    """
    server = f"frontends = {frontends}\n{server}"
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupool-")))
        if "emulated" in config:
            prepare_state(folder / "state")
        yield stack.enter_context(
            daemons.private_daemon(config, folder, server=server, start=start_daemon)
        )


@contextlib.contextmanager
def sim_daemon(
    config: str,
    folder: Path,
    names: Sequence[str],
    *,
    max_model_len: int = 4096,
    frontends: int = 1,
    server: str = "",
    **options: object,
) -> Iterator[PrivateDaemon]:
    """A daemon with simulated devices and models of a checkpoint without weights."""
    checkpoint = make_dummy_checkpoint(folder, SIM_SHAPE)
    with private_daemon(config, folder / "daemon", frontends=frontends, server=server) as daemon:
        for name in names:
            daemon.add_model(name, checkpoint, max_model_len=max_model_len, **options)
        yield daemon


# Asking


@dataclass(slots=True)
class Answer:
    """One streamed completion as its client saw it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@contextlib.asynccontextmanager
async def api_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def open_stream(
    api: AsyncOpenAI, model: str, prompt: str, max_tokens: int
) -> AsyncStream[Completion]:
    """A greedy completion of exactly ``max_tokens`` tokens, as a stream."""
    return await api.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


async def ask(api: AsyncOpenAI, model: str, prompt: str, max_tokens: int = 48) -> Answer:
    """The whole of such a stream."""
    answer = Answer()
    async for chunk in await open_stream(api, model, prompt, max_tokens):
        note(answer, chunk)
    return answer


async def undisturbed(
    api: AsyncOpenAI, asked: Sequence[tuple[str, str]], num_tokens: int
) -> list[Answer]:
    """What each prompt of each model is answered, one after the other."""
    return [await ask(api, model, text, num_tokens) for model, text in asked]


def note(answer: Answer, chunk: Completion) -> None:
    """Add a piece to the answer."""
    for choice in chunk.choices:
        answer.text += choice.text
        answer.token_ids += (choice.model_extra or {}).get("token_ids") or []
        answer.finish_reason = choice.finish_reason or answer.finish_reason


class Background:
    """A greedy stream that runs while something else happens, and must not notice it."""

    def __init__(self, api: AsyncOpenAI, model: str, prompt: str, max_tokens: int = LONG) -> None:
        self._arguments = (api, model, prompt, max_tokens)
        self.answer = Answer()
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def started(self) -> None:
        """Return once its first tokens have come."""
        waiter = asyncio.ensure_future(self._started.wait())
        await asyncio.wait({waiter, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            waiter.cancel()
            await self._task

    @property
    def is_running(self) -> bool:
        """True if tokens are still to come."""
        return not self._task.done()

    def leave(self) -> None:
        """Close the connection."""
        self._task.cancel()

    async def finished(self) -> Answer:
        """The whole answer; raises what the client got instead."""
        return await self._task

    async def _read(self) -> Answer:
        async for chunk in await open_stream(*self._arguments):
            note(self.answer, chunk)
            self._started.set()
        return self.answer


# Waiting


async def eventually(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], timeout_s: float = 20.0
) -> None:
    """Wait until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        holds = condition()
        if not isinstance(holds, bool):
            holds = await holds
        if holds:
            return
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        await asyncio.sleep(_POLL_S)


def set_roles(daemon: PrivateDaemon, *roles: RoleName) -> None:
    """Of all devices, in their order."""
    with daemon.client() as client:
        for number, role in enumerate(roles):
            client.set_role(number, role)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """The same without an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(_POLL_S)


def free_port() -> int:
    """A port on the loopback address that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


# Looking


def ps(daemon: PrivateDaemon) -> Ps:
    """What runs now."""
    with daemon.client() as client:
        return client.ps()


def usage(daemon: PrivateDaemon, model: str) -> ModelUsage:
    """One model's row of ``ps``."""
    return next(row for row in ps(daemon).models if row.name == model)


def device(daemon: PrivateDaemon) -> DeviceInfo:
    """The only device's row of ``ps``."""
    [row] = ps(daemon).devices
    return row


def check(daemon: PrivateDaemon) -> dict[str, int]:
    """The worker's accounts agree with its page tables; free and all pages."""
    with admin_http(daemon) as http:
        response = http.post("/check")
    assert response.status_code == 200, response.text
    [accounts] = response.json()
    return dict(accounts)


def check_all(daemon: PrivateDaemon) -> list[dict[str, int]]:
    """As ``check``, for every worker of a daemon with several."""
    with admin_http(daemon) as http:
        response = http.post("/check")
    assert response.status_code == 200, response.text
    return [dict(accounts) for accounts in response.json()]


def admin_http(daemon: PrivateDaemon, timeout_s: float = 30.0) -> httpx.Client:
    """The admin API without our client, for what that would not send."""
    transport = httpx.HTTPTransport(uds=str(daemon.socket_path), verify=False)
    return httpx.Client(transport=transport, base_url="http://gpupoold", timeout=timeout_s)


@dataclass(frozen=True, slots=True)
class Traces:
    """Everything that knows of a model; equal before and after what must leave no trace.

    Which models are resident may differ; but all pages must be free or somebody's.
    """

    registered: tuple[str, ...]
    listed: tuple[str, ...]
    on_device: tuple[str, ...]
    cache_bytes: int
    num_pages: int
    lost_bytes: int
    snapshots: tuple[str, ...]

    @classmethod
    def of(cls, daemon: PrivateDaemon) -> Traces:
        """Look everywhere; the device must be idle."""
        accounts = check(daemon)
        with contextlib.suppress(AssertionError):
            until(lambda: lost_bytes(daemon) == 0, 2)
        with daemon.client() as client:
            models, status, now = client.models(), client.status(), client.ps()
        listed = httpx.get(f"{daemon.http_url}/v1/models").json()["data"]
        pids = [daemon.process.pid, *(row.pid for row in now.devices if row.pid)]
        return cls(
            tuple(f"{model.name} {model.aliases} {model.state}" for model in models),
            tuple(sorted(f"{row['id']} {row['aliases']} {row['status']}" for row in listed)),
            tuple(row.name for row in now.models if row.weights_total_bytes),
            status.model_cache_bytes,
            accounts["pages"],
            lost_bytes(daemon),
            tuple(sorted(set(itertools.chain.from_iterable(map(_snapshots_held, pids))))),
        )


def lost_bytes(daemon: PrivateDaemon) -> int:
    """Device memory that is neither free nor a registered model's."""
    now = ps(daemon)
    [row] = now.devices
    used = sum(model.weights_resident_bytes + model.kv_resident_bytes for model in now.models)
    return row.device_bytes - row.free_bytes - used


def _snapshots_held(pid: int) -> Iterator[str]:
    """Weights snapshots that a process has open or mapped."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "gpupool-snapshot" in (target := os.readlink(link)):
                yield target.split()[0]
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "gpupool-snapshot" in line:
            yield line.split()[5]


# The command line


def cli(daemon: PrivateDaemon | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``gpupool`` as a user would."""
    socket_path = daemon if isinstance(daemon, Path) else daemon.socket_path
    return run_command(arguments, child_env() | {"GPUPOOL_SOCKET": str(socket_path)})


def child_env(*, shares_import: bool = False) -> dict[str, str]:
    """Environment for processes that import the project from this checkout.

    With ``shares_import`` their daemons have vLLM from the tests' import server.
    """
    path = os.pathsep.join(filter(None, sys.path)) if shares_import else PYTHON_PATH
    return os.environ | {"PYTHONPATH": path}


# Starting and ending


def child(daemon: PrivateDaemon, module: str) -> psutil.Process:
    """The child, or child of its fork server, that runs ``python -m gpupoold.MODULE``."""
    [found] = [one for one in descendants(daemon) if module_of(one) == f"gpupoold.{module}"]
    return found


def frontend(daemon: PrivateDaemon, number: int) -> psutil.Process:
    """The process of a frontend, which runs now."""
    with daemon.client() as client:
        pid = client.status().frontends[number].pid
    assert pid is not None
    return psutil.Process(pid)


def frontend_pids(daemon: PrivateDaemon) -> list[int | None]:
    """The process ids of all frontends, None of one that does not run now."""
    with daemon.client() as client:
        return [one.pid for one in client.status().frontends]


def are_frontends_ready(daemon: PrivateDaemon) -> bool:
    """Return whether all frontends accept connections."""
    with daemon.client() as client:
        return all(one.state == "ready" for one in client.status().frontends)


@contextlib.contextmanager
def only_frontend(daemon: PrivateDaemon, number: int) -> Iterator[None]:
    """Inside, connections are accepted by one frontend: the others are suspended."""
    others = [frontend(daemon, n) for n, _ in enumerate(frontend_pids(daemon)) if n != number]
    for one in others:
        one.suspend()
    try:
        yield
    finally:
        for one in others:
            one.resume()


def all_gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    """Return whether all of them end in time; a process whose new parent has not reaped it has
    ended."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    return not any(map(_runs, alive))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Restartable:
    """A daemon on one state folder that tests may kill: ``running`` starts it again."""

    def __init__(self, config: str, folder: Path, models: dict[str, Path]) -> None:
        self._config = config
        self._folder = folder
        self._models = models
        self._stack = contextlib.ExitStack()
        self._daemon: PrivateDaemon | None = None

    def running(self, further: Set[str] = frozenset()) -> PrivateDaemon:
        """The daemon with all its and further models ready, which come by themselves later on."""
        if self._daemon is None or self._daemon.process.poll() is not None:
            self._stack.close()
            is_new = self._daemon is None
            daemon = self._stack.enter_context(
                private_daemon(self._config, self._folder, frontends=2)
            )
            self._daemon = daemon
            for name, path in self._models.items() if is_new else ():
                daemon.add_model(name, path, **LOAD_OPTIONS)
        daemon = self._daemon
        until(lambda: {row.state for row in ps(daemon).models} == {"ready"}, 60)
        assert {row.name for row in ps(daemon).models} == self._models.keys() | further
        return daemon

    def close(self) -> None:
        """Stop it if it runs."""
        self._stack.close()
