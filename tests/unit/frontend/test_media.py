"""Media by URL: fetched from listed hosts, without redirects, and from no other.

The fetches are real: a server on this machine counts who connects. vLLM is imported in a process
of its own, as a frontend prepares its environment.
"""

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

_FETCH = """
import asyncio, json, sys
from gpupoold.frontend.preload import set_engine_environment
set_engine_environment("error")
import gpupoold.frontend.rendering
import vllm.envs as envs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

async def fetch(hosts, url):
    connector = MEDIA_CONNECTOR_REGISTRY.load(
        envs.VLLM_MEDIA_CONNECTOR, allowed_local_media_path="", allowed_media_domains=hosts
    )
    try:
        image = await connector.fetch_image_async(url)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{getattr(image, 'media', image).size}"

async def main():
    return [await fetch(*one) for one in json.load(sys.stdin)]

print(json.dumps(asyncio.run(main())))
"""

# One black pixel.
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010100000000376ef9240000000a49444154789c63600000"
    "0002000148afa4710000000049454e44ae426082"
)


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/image")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/large":
            self.send_response(200)
            self.send_header("content-length", "20000001")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("content-length", str(len(_PNG)))
        self.end_headers()
        self.wfile.write(_PNG)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_media_come_from_listed_hosts_only(server: _Server) -> None:
    base = f"http://127.0.0.1:{server.server_address[1]}"
    asked = [
        ([], f"{base}/refused"),
        (["localhost"], f"{base}/refused"),
        (["127.0.0.1"], f"{base}/image"),
        (["127.0.0.1"], f"{base}/moved"),
        ([], "file:///etc/hostname"),
        ([], "http://169.254.169.254/latest/meta-data"),
        (["127.0.0.1"], f"{base}/missing"),
        (["127.0.0.1"], f"{base}/large"),
        ([], "data:image/png;base64," + base64.b64encode(_PNG).decode()),
        ([], "data:image/png;base64,AAAA"),
        ([], "data:image/png,AAAA"),
        ([], "ftp://127.0.0.1/image"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", _FETCH], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    unlisted, other, listed, moved, file, metadata, *more = json.loads(done.stdout.splitlines()[-1])
    for refusal in (unlisted, other, metadata):
        assert refusal.startswith("VLLMValidationError: Media are not fetched from")
        assert "security.media_hosts" in refusal
    assert listed == "(1, 1)"
    assert "none of the formats" in moved  # an empty body
    assert "neither a data: URL nor on a web server" in file
    missing, large, data, garbage, unencoded, ftp = more
    assert "404" in missing
    assert "20000000 bytes" in large
    assert data == "(1, 1)"
    assert "none of the formats" in garbage
    assert "base64" in unencoded
    assert "neither a data: URL nor" in ftp
    refusals = (moved, file, missing, large, garbage, unencoded, ftp)
    assert all(one.startswith("VLLMValidationError: ") for one in refusals)
    assert server.paths == ["/image", "/moved", "/missing", "/large"]
