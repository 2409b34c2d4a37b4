"""A daemon with API keys, HTTPS and groups, and what its tests do to it."""

from __future__ import annotations

import contextlib
import grp
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI
from typer.testing import CliRunner, Result

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupool_cli.main import app
from gpupoold.api.schemas_access import AddKeyRequest, KeyInfo
from tests.functional.daemon_tools import admin_http, ask

MODELS = ("one", "two")
MAX_LIVE = 4
ALONE = {os.getgid(), *os.getgroups()}
ADMINS, READERS = [one for one in grp.getgrall() if one.gr_gid not in ALONE][:2]
STRANGER = 4_000_000
CONFIG = f"""
[[device]]
kind = "sim"
gpu = "A10"

[memory]
model_cache = 0

[limits]
max_live_requests_per_model = {MAX_LIVE}

[access]
require_keys = "always"
admin_group = "{ADMINS.gr_name}"
read_only_group = "{READERS.gr_name}"
"""
# Looked for everywhere at the end.
PROMPT = "the marmot whistles at seven"


@dataclass(frozen=True, slots=True)
class Box:
    """The daemon, its folder and certificate, and every key that was ever made."""

    daemon: PrivateDaemon
    folder: Path
    certificate: Path
    texts: list[str]

    def add(self, name: str, **powers: Any) -> str:
        """The text of a new key."""
        with self.daemon.client() as client:
            new = client.add_key(AddKeyRequest(name=name, **powers))
        self.texts.append(new.text)
        return new.text

    def key(self, name: str) -> KeyInfo:
        """What is known of a key."""
        with self.daemon.client() as client:
            [found] = [key for key in client.api_keys() if key.name == name]
        return found

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))

    @contextlib.asynccontextmanager
    async def api(self, key: str) -> AsyncIterator[AsyncOpenAI]:
        """The official client with this key."""
        async with (
            openai.DefaultAsyncHttpxClient(verify=self.trust) as http,
            AsyncOpenAI(
                base_url=f"{self.daemon.http_url}/v1", api_key=key, max_retries=0, http_client=http
            ) as client,
        ):
            yield client

    def http(self, key: str | None = None) -> httpx.Client:
        """Plain HTTP."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.daemon.http_url, verify=self.trust, headers=headers)


async def refusal(box: Box, key: str, model: str = "one", **more: Any) -> openai.APIStatusError:
    async with box.api(key) as api:
        with pytest.raises(openai.APIStatusError) as caught:
            await api.completions.create(model=model, prompt=PROMPT, max_tokens=3, **more)
    return caught.value


async def answer(box: Box, key: str, model: str = "one", num_tokens: int = 3) -> int:
    async with box.api(key) as api:
        return len((await ask(api, model, PROMPT, num_tokens)).token_ids)


def run_cli(box: Box, *arguments: str, **variables: str) -> Result:
    """The command line in this process, which is many times quicker than one of its own."""
    socket = ("--socket", str(box.daemon.socket_path))
    return CliRunner().invoke(app, [*socket, *arguments], env=variables, catch_exceptions=False)


AS_SOMEBODY = """
import http.client, os, socket, sys
group, *others = map(int, sys.argv[1].split(","))
os.setgroups(others)
os.setgid(group)
os.setuid(int(sys.argv[2]))
for call in sys.argv[3:]:
    method, path, *body = call.split(" ", 2)
    connection = http.client.HTTPConnection("gpupoold")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect("admin.sock")
    connection.request(method, path, *body, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
"""


def as_somebody(box: Box, groups: str, *calls: str) -> list[str]:
    """What the daemon answers a user with these groups; from the folder of the socket, as the
    folders above may be closed to others."""
    done = subprocess.run(
        [sys.executable, "-ISc", AS_SOMEBODY, groups, str(STRANGER), *calls],
        cwd=box.daemon.socket_path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def places(box: Box) -> Iterator[tuple[str, bytes]]:
    """Everything that others might read: files, command lines, environments, answers."""
    for file in box.folder.rglob("*"):
        if file.is_file():
            yield str(file), file.read_bytes()
    for process in [psutil.Process(box.daemon.process.pid), *descendants(box.daemon)]:
        for name in ("cmdline", "environ"):
            yield f"{process.pid} {name}", Path(f"/proc/{process.pid}/{name}").read_bytes()
    paths = ("/keys?revoked=true", "/status", "/ps", "/events?limit=1000", "/requests", "/models")
    with admin_http(box.daemon) as http:
        for path in (*paths, "/logs?lines=100000", "/event-log", "/switches", "/config"):
            response = http.get(path)
            assert response.status_code == 200, path
            yield path, response.content
    with box.http(box.add("looks")) as http:
        for path in ("/metrics", "/v1/models", "/version"):
            yield path, http.get(path).content
