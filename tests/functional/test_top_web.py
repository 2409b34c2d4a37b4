"""``gpupool top --web``: the application over a websocket, for visitors with the secret alone."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import psutil
import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import until

pytest.importorskip("textual_serve", reason="needs gpupool[web]")


@contextlib.contextmanager
def serving(box: PrivateDaemon) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server's process, and the address that it prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gpupool_cli.start", "--socket", str(box.socket_path)]
    command += ["top", "--web", "--port", str(port), "--interval", "500ms"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(r"open (\S+) \(Ctrl\+C ends the server\)\n", line)
            assert found is not None, line
            yield process, found[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(sim_box: PrivateDaemon) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving(sim_box) as (process, address):
        yield process, address
        process.terminate()
        assert process.wait(10) == 0


async def text_of(session: aiohttp.ClientSession, url: str, wanted: str) -> str:
    """What the application draws, until ``wanted`` is there."""
    shown = ""
    async with asyncio.timeout(60), session.ws_connect(f"{url}/ws?width=120&height=40") as page:
        while wanted not in shown:
            message = await page.receive()
            assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT)
            data = message.data
            shown += data.decode(errors="replace") if isinstance(data, bytes) else data
    return shown


def test_a_visitor_with_the_secret_gets_the_application(
    served: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = served
    url = address.partition("/?")[0]

    async def run() -> str:
        jar = aiohttp.CookieJar(unsafe=True)  # which keeps cookies of addresses
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            async with session.get(address) as page:
                assert page.status == 200
                assert page.url.query_string == ""  # the secret leaves the address bar
                assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            return await text_of(session, url, "model_added")

    assert "Devices" in asyncio.run(run())
    # The process of the page ends with the page.
    until(lambda: not psutil.Process(process.pid).children(recursive=True))


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_of_pages_end_with_the_server(
    sim_box: PrivateDaemon, signal_number: signal.Signals
) -> None:
    async def run(process: subprocess.Popen[str], address: str) -> list[psutil.Process]:
        jar = aiohttp.CookieJar(unsafe=True)
        url = address.partition("/?")[0]
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            async with session.get(address):
                pass
            async with session.ws_connect(f"{url}/ws?width=120&height=40") as page:
                await page.receive(timeout=60)
                children = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal_number)
                await asyncio.to_thread(process.wait, 20)
                return children

    with serving(sim_box) as (process, address):
        children = asyncio.run(run(process, address))
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/ws", {}),
        ("/static/js/textual.js", {}),
        ("/?secret=guess", {}),
        ("/", {"Cookie": "gpupool_top=guess"}),
    ],
)
def test_others_are_refused(
    served: tuple[subprocess.Popen[str], str], path: str, headers: dict[str, str]
) -> None:
    url = served[1].partition("/?")[0]

    async def status() -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url + path, headers=headers) as page,
        ):
            return page.status

    assert asyncio.run(status()) == 403


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_other_sites_are_refused_whatever_they_know(
    served: tuple[subprocess.Popen[str], str], headers: dict[str, str]
) -> None:
    async def status() -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.get(served[1], headers=headers, allow_redirects=False) as page,
        ):
            return page.status

    assert asyncio.run(status()) == 403


def test_a_port_in_use_is_named(
    served: tuple[subprocess.Popen[str], str], sim_box: PrivateDaemon
) -> None:
    port = re.findall(r":(\d+)/", served[1])[0]
    command = [sys.executable, "-m", "gpupool_cli.start", "--socket", str(sim_box.socket_path)]
    command += ["top", "--web", "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert f"cannot listen on port {port}" in ended.stderr
