"""The examples of clients and proxies, run as a user would, against a daemon.

Packages that are not installed beside gpupool are taken from ``GPUPOOL_CLIENTS_PYTHON``, a Python
that has them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from benchmarks.bench.rig import emulated_config
from benchmarks.private_daemon import PrivateDaemon
from tests.certificates import make_certificate
from tests.conftest import ROOT
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN3,
    emulated_config as functional_config,
    free_port,
    private_daemon,
    usage,
)

EXAMPLES = ROOT / "examples" / "clients"
_START_TIMEOUT_S = 90.0


def python_with(module: str) -> str:
    """A Python that can import ``module``; skips the test without one."""
    if "." not in module and importlib.util.find_spec(module) is not None:
        return sys.executable
    for python in (sys.executable, os.environ.get("GPUPOOL_CLIENTS_PYTHON", "")):
        command = [python, "-c", f"import {module}"]
        if python and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"{module} is not installed here, nor in GPUPOOL_CLIENTS_PYTHON")


def environment(url: str) -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    keep |= {"GPUPOOL_URL": url, "GPUPOOL_KEY": "none", "GPUPOOL_MODEL": LLAMA}
    return keep | {"GPUPOOL_MODELS": f"{LLAMA},{QWEN3}", "NO_PROXY": "*"}


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], url: str, path: Path) -> Iterator[None]:
    """A server inside the context, from when it answers on."""
    log = path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=path)
    try:
        ends_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(url, verify=False, trust_env=False)
                break
            assert time.monotonic() < ends_s, log.read_text()[-3000:]
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(30)


def streamed(client: OpenAI) -> str:
    """The text of a streamed answer of one model."""
    stream = client.completions.create(
        model=LLAMA, prompt="Say hello.", max_tokens=16, temperature=0, stream=True
    )
    return "".join(choice.text or "" for chunk in stream for choice in chunk.choices)


def assert_at_once(client: Any, url: str) -> None:
    """Check that the tokens of a stream come one after the other."""
    body = {"model": LLAMA, "prompt": "Hi", "max_tokens": 200, "stream": True}
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        times_s = [time.monotonic() for line in response.iter_lines() if line]
    assert times_s[-1] - times_s[0] > 0.05, "the tokens came all at once"


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("openai_chat", "openai"),
        pytest.param("anthropic_messages", "anthropic", marks=pytest.mark.slow),
        ("langchain_chain", "langchain_openai"),
    ],
)
def test_a_script_prints_an_answer(pool: PrivateDaemon, script: str, module: str) -> None:
    command = [python_with(module), str(EXAMPLES / f"{script}.py")]
    done = subprocess.run(
        command,
        env=environment(pool.http_url),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


def test_litellm_passes_models_and_streams_on(pool: PrivateDaemon, tmp_path: Path) -> None:
    python, port = python_with("litellm.proxy.proxy_server"), free_port()
    command = [str(Path(python).parent / "litellm"), "--config", str(EXAMPLES / "litellm.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = environment(f"{pool.http_url}/v1") | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": "sk-of-tests",
    }
    url = f"http://127.0.0.1:{port}"
    with running(command, env, f"{url}/health/liveliness", tmp_path):
        through = OpenAI(base_url=f"{url}/v1", api_key="sk-of-tests")
        alone = OpenAI(base_url=f"{pool.http_url}/v1", api_key="none")
        assert streamed(through) == streamed(alone)
        chat = [{"role": "user", "content": "Hello"}]
        for model in (LLAMA, QWEN3):
            answer = through.chat.completions.create(
                model=model,
                messages=chat,  # type: ignore[arg-type]
                max_tokens=8,
            )
            assert answer.choices[0].message.content


def test_litellm_in_front_of_two_boxes(
    pool: PrivateDaemon, tiny_models: dict[str, Path], device_bytes: int, tmp_path: Path
) -> None:
    python, port = python_with("litellm.proxy.proxy_server"), free_port()
    text = (EXAMPLES / "litellm-boxes.yaml").read_text()
    config = tmp_path / "boxes.yaml"
    config.write_text(text.replace("llama-8b", LLAMA).replace("qwen-7b", QWEN3))
    command = [str(Path(python).parent / "litellm"), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    through = OpenAI(base_url=f"{url}/v1", api_key="sk-of-tests", max_retries=0)
    with private_daemon(functional_config(device_bytes), tmp_path / "second") as second:
        second.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
        env = environment("") | {
            "GPUPOOL_URL_1": f"{pool.http_url}/v1",
            "GPUPOOL_URL_2": f"{second.http_url}/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": "sk-of-tests",
        }
        with running(command, env, f"{url}/health/liveliness", tmp_path):
            text = streamed(through)
            with ThreadPoolExecutor(8) as threads:
                answers = [threads.submit(streamed, through) for _ in range(8)]
            assert {answer.result() for answer in answers} == {text}
            assert through.completions.create(model=QWEN3, prompt="Hi", max_tokens=4).choices
            with second.client() as client:
                (model,) = client.ps().models
            assert 0 < model.completed < 9, "all requests went to one box"
            second.process.kill()
            for _ in range(4):
                assert streamed(through) == text


def test_nginx_with_tls_sends_tokens_on_at_once(pool: PrivateDaemon, tmp_path: Path) -> None:
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
    certificate, key = make_certificate(tmp_path, "localhost")
    port = free_port()
    changes = {
        "server 127.0.0.1:8000": f"server {pool.http_url.removeprefix('http://')}",
        "listen 443": f"listen 127.0.0.1:{port}",
        "gpupool.example.com": "localhost",
        "/etc/nginx/tls/gpupool.crt": str(certificate),
        "/etc/nginx/tls/gpupool.key": str(key),
        "/var/log/nginx/gpupool.log": str(tmp_path / "access.log"),
        "events {}": f"pid {tmp_path}/nginx.pid; daemon off; events {{}}",
    }
    text = (EXAMPLES / "nginx.conf").read_text()
    for written, here in changes.items():
        assert written in text
        text = text.replace(written, here)
    config = tmp_path / "nginx.conf"
    config.write_text(text)
    url = f"https://127.0.0.1:{port}"
    command = [nginx, "-e", "stderr", "-p", str(tmp_path), "-c", str(config)]
    trust = ssl.create_default_context(cafile=str(certificate))
    with (
        running(command, dict(os.environ), f"{url}/health", tmp_path),
        DefaultHttpxClient(verify=trust, trust_env=False) as trusting,
    ):
        through = OpenAI(base_url=f"{url}/v1", api_key="gpk-secret", http_client=trusting)
        alone = OpenAI(base_url=f"{pool.http_url}/v1", api_key="none")
        assert streamed(through) == streamed(alone)
        assert_at_once(trusting, url)
    assert "secret" not in (tmp_path / "access.log").read_text()


def test_caddy_with_tls_sends_tokens_on_at_once(pool: PrivateDaemon, tmp_path: Path) -> None:
    caddy = shutil.which("caddy")
    if caddy is None:
        pytest.skip("Caddy is not installed (Debian: apt-get install caddy)")
    port = free_port()
    changes = {
        "gpupool.example.com {": f"https://localhost:{port} {{\n\ttls internal",
        "127.0.0.1:8000 {": f"{pool.http_url.removeprefix('http://')} {{",
    }
    text = (EXAMPLES / "Caddyfile").read_text()
    for written, here in changes.items():
        assert text.count(written) == 1
        text = text.replace(written, here)
    # The certificates stay in the test's folder; the machine's stores are left alone.
    kept = "{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n}\n"
    (tmp_path / "Caddyfile").write_text(kept + text)
    env = dict(os.environ) | {"XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [caddy, "run", "--config", str(tmp_path / "Caddyfile"), "--adapter", "caddyfile"]
    url = f"https://localhost:{port}"
    with running(command, env, f"{url}/health", tmp_path):
        [root] = tmp_path.glob("caddy/pki/authorities/local/root.crt")
        trust = ssl.create_default_context(cafile=str(root))
        with DefaultHttpxClient(verify=trust, trust_env=False) as trusting:
            through = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=trusting)
            alone = OpenAI(base_url=f"{pool.http_url}/v1", api_key="none")
            assert streamed(through) == streamed(alone)
            assert_at_once(trusting, url)


@pytest.mark.slow
def test_continue_answers_with_its_configuration(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    command_line = os.environ.get("GPUPOOL_CONTINUE_CLI") or shutil.which("cn")
    if not command_line:
        pytest.skip("Continue's command line is not installed (npm: @continuedev/cli)")
    # The instructions and tools of an agent are longer than the tiny models' contexts.
    shutil.copytree(tiny_models[LLAMA], tmp_path / "coder")
    settings = json.loads((tmp_path / "coder" / "config.json").read_text())
    settings["max_position_embeddings"] = 1 << 16
    (tmp_path / "coder" / "config.json").write_text(json.dumps(settings))
    # The tiny model rarely ends an answer by itself.
    (tmp_path / "coder" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 64}))
    home = {"HOME": str(tmp_path), "CONTINUE_GLOBAL_DIR": str(tmp_path / "continue")}
    quiet = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_METRICS_ENABLED": "0"}
    with private_daemon(emulated_config(512 << 20), tmp_path / "box") as daemon:
        options = {"max_model_len": 1 << 16, "engine": {"tool-call-parser": "hermes"}}
        daemon.add_model("coder-7b", tmp_path / "coder", dtype="float32", **options)
        text = (EXAMPLES / "continue.yaml").read_text()
        assert text.count("http://127.0.0.1:8000") == 2
        config = tmp_path / "config.yaml"
        config.write_text(text.replace("http://127.0.0.1:8000", daemon.http_url))
        done = subprocess.run(
            [command_line, "-p", "Hi", "--config", str(config)],
            env={"PATH": os.environ["PATH"], "NO_PROXY": "*"} | home | quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert done.stdout.strip()
        assert usage(daemon, "coder-7b").completed > 0


def test_open_webui_lists_models_and_chats(pool: PrivateDaemon, tmp_path: Path) -> None:
    python, port = python_with("open_webui"), free_port()
    written = dict(
        line.split("=", 1)
        for line in (EXAMPLES / "open-webui.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert written["OPENAI_API_BASE_URL"] == "http://127.0.0.1:8000/v1"
    written["OPENAI_API_BASE_URL"] = f"{pool.http_url}/v1"
    # Nothing is downloaded, and nobody signs in.
    alone = {
        "DATA_DIR": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OFFLINE_MODE": "1",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of tests",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_PROXY": "*"} | written | alone
    command = [str(Path(python).parent / "open-webui"), "serve", "--host", "127.0.0.1"]
    url = f"http://127.0.0.1:{port}"
    with (
        running([*command, "--port", str(port)], env, f"{url}/health", tmp_path),
        httpx.Client(base_url=url, trust_env=False, timeout=60) as browser,
    ):
        signed_in = browser.post("/api/v1/auths/signin", json={"email": "", "password": ""})
        browser.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
        found = {one["id"] for one in browser.get("/api/models").json()["data"]}
        assert {LLAMA, QWEN3} <= found
        body = {
            "model": LLAMA,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "stream": False,
        }
        answer = browser.post("/api/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]


def test_documentation_names_every_example() -> None:
    text = (ROOT / "docs" / "clients.md").read_text()
    named = set(re.findall(r"examples/clients/([\w.-]+)", text))
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"__init__.py"}
    assert named == files
