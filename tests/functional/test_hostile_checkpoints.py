"""Hostile checkpoints and files, against a real daemon: nothing else stops, waits or is lost."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.errors import ConfigError, GpupoolError, Refused
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    child_env,
    cli,
    emulated_config,
    frontend_pids,
    private_daemon,
    ps,
)
from tests.functional.images import MAX_LEN, messages
from tests.support.programs import run_daemon

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SLOW_FOR_LONG_TEXTS = (
    "{% for m in messages %}{{ m.content }}{% if m.content|length > 200000 %}"
    + LOOPS
    + "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def pool(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    with private_daemon(emulated_config(device_bytes), tmp_path_factory.mktemp("pool")) as daemon:
        daemon.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
        yield daemon


def chat(pool: PrivateDaemon, model: str, text: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return httpx.post(f"{pool.http_url}/v1/chat/completions", json=body, timeout=120)


def copy(source: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(source, target)
    if config:
        file = target / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


def refusal(pool: PrivateDaemon, source: Path) -> GpupoolError:
    with pytest.raises(Refused) as caught:
        pool.add_model("unwanted", source, **LOAD_OPTIONS)
    assert "unwanted" not in [row.name for row in ps(pool).models]
    return caught.value


def test_later_additions_work_after_refused_ones(
    pool: PrivateDaemon, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    processes = frontend_pids(pool)
    source = tiny_models[LLAMA]
    endless = copy(source, tmp_path / "endless")
    (endless / "chat_template.jinja").write_text(LOOPS)
    assert "the chat template takes more than 1 s of CPU time" in refusal(pool, endless).message
    deep = copy(source, tmp_path / "deep", num_hidden_layers=1_000_000_000)
    assert "num_hidden_layers is 1000000000, but the weights" in refusal(pool, deep).message
    nothing = copy(source, tmp_path / "nothing", rms_norm_eps=math.nan)
    assert "rms_norm_eps is nan, which is not a finite" in refusal(pool, nothing).message
    narrow = copy(source, tmp_path / "narrow", num_key_value_heads=1, num_attention_heads=2)
    assert "have a place in the model" in refusal(pool, narrow).message
    pipe = copy(source, tmp_path / "pipe")
    (pipe / "model.safetensors").unlink()
    os.mkfifo(pipe / "model.safetensors")
    with ThreadPoolExecutor(8) as threads:
        found = [one.result() for one in [threads.submit(refusal_of, pool, pipe)] * 8]
    assert all("is a named pipe, not a regular file" in message for message in found)
    pool.add_model("good", tiny_models[QWEN2], **LOAD_OPTIONS)
    assert chat(pool, "good", "hello").status_code == 200
    assert cli(pool, "rm", "good", "--force").returncode == 0
    assert frontend_pids(pool) == processes


def refusal_of(pool: PrivateDaemon, source: Path) -> str:
    try:
        pool.add_model(f"unwanted-{os.urandom(4).hex()}", source, **LOAD_OPTIONS)
    except Refused as error:
        return error.message
    return ""


def test_a_template_that_is_slow_for_a_clients_text_ends_that_request_alone(
    pool: PrivateDaemon, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    processes = frontend_pids(pool)
    source = copy(tiny_models[LLAMA], tmp_path / "slow")
    (source / "chat_template.jinja").write_text(SLOW_FOR_LONG_TEXTS)
    pool.add_model("slow", source, **LOAD_OPTIONS)
    try:
        answer = chat(pool, "slow", "x" * 200_001)
        assert answer.status_code == 400, answer.text
        assert "takes more than 2 s of CPU time for this conversation" in answer.text
        assert chat(pool, "slow", "hello").status_code == 200
        assert chat(pool, LLAMA, "hello").status_code == 200
    finally:
        assert cli(pool, "rm", "slow", "--force").returncode == 0
    assert frontend_pids(pool) == processes


def test_tokens_beyond_the_vocabulary_end_no_worker(
    pool: PrivateDaemon, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    source = copy(tiny_models[LLAMA], tmp_path / "beyond")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokens = tokenizer["added_tokens"]
    tokens.append(tokens[-1] | {"id": tokens[-1]["id"] + 1, "content": "<beyond>"})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    ends = [2, 1_000_000, -1_000_000]
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    pool.add_model("beyond", source, **LOAD_OPTIONS)
    worker = ps(pool).devices[0].pid
    refused = ask_for(pool, "beyond", prompt="<beyond>")
    assert refused.status_code == 400
    assert "beyond the model's vocabulary of 2,048 tokens" in refused.text
    for fields in ({"min_tokens": 2}, {"bad_words": ["<beyond>"]}, {"stop": "x"}):
        assert ask_for(pool, "beyond", prompt="hi", **fields).status_code == 200
    assert chat(pool, "beyond", "<beyond>").status_code == 400
    assert ps(pool).devices[0].pid == worker
    with pool.client() as client:
        client.remove_model("beyond")


def test_images_whose_placeholder_is_beyond_the_vocabulary(
    pool: PrivateDaemon, vision_models: dict[str, Path], tmp_path: Path
) -> None:
    """The embeddings of the image replace the placeholders, whatever their number is."""
    original = vision_models["tiny-qwen2.5-vl"]
    config = json.loads((original / "config.json").read_text())
    rows, image = config["text_config"]["vocab_size"], config["image_token_id"]
    beyond = copy(original, tmp_path / "beyond", image_token_id=rows + 100)
    tokenizer = json.loads((beyond / "tokenizer.json").read_text())
    tokens = tokenizer["added_tokens"]
    (token,) = (one for one in tokens if one["id"] == image)
    fillers = range(tokens[-1]["id"] + 1, rows + 100)
    tokens += [token | {"id": one, "content": f"<filler-{one}>"} for one in fillers]
    tokens.append(token | {"id": rows + 100})
    tokens[tokens.index(token)] = token | {"content": "<filler>"}
    (beyond / "tokenizer.json").write_text(json.dumps(tokenizer))
    answers = {}
    for name, source in (("original", original), ("beyond", beyond)):
        pool.add_model(name, source, max_model_len=MAX_LEN)
        worker = ps(pool).devices[0].pid
        answers[name] = [
            ask_about_image(pool, name, **fields)
            for fields in ({}, {"repetition_penalty": 1.5}, {"prompt_logprobs": 1})
        ]
        assert ps(pool).devices[0].pid == worker
        with pool.client() as client:
            client.remove_model(name)
    assert answers["beyond"] == answers["original"]


def ask_about_image(pool: PrivateDaemon, model: str, **fields: Any) -> list[int]:
    """Return the tokens of a greedy answer about an image."""
    body = {
        "model": model,
        "messages": messages((1,)),
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    answer = httpx.post(f"{pool.http_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def ask_for(pool: PrivateDaemon, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "max_tokens": 4, **fields}
    return httpx.post(f"{pool.http_url}/v1/completions", json=body, timeout=60)


def test_files_that_change_after_the_first_load(
    pool: PrivateDaemon, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """An endless template is not mounted, a pipe not read.

    The daemon looks at what a worker reads, before each load; the rest is read at mounts.
    """
    source = copy(tiny_models[LLAMA], tmp_path / "changing")
    template = source / "chat_template.jinja"
    pool.add_model("changing", source, **LOAD_OPTIONS)
    [worker] = [row.pid for row in ps(pool).devices]
    try:
        before = template.read_text()
        template.write_text(LOOPS)
        with pool.client() as client, pytest.raises(Refused, match="takes more than 1 s of CPU"):
            client.set_model("changing", SetModelRequest(add_aliases=["another"]))
        assert chat(pool, "changing", "hello").status_code == 200  # by the API mounted before
        template.write_text(before)
        for name, status in (("generation_config.json", 200), ("config.json", 503)):
            assert cli(pool, "unload", "changing").returncode == 0
            (source / name).unlink()
            os.mkfifo(source / name)
            answer = ask_for(pool, "changing", prompt="hello")
            assert answer.status_code == status, answer.text
            assert ask_for(pool, LLAMA, prompt="hello").status_code == 200
            assert [row.pid for row in ps(pool).devices] == [worker]
    finally:
        assert cli(pool, "rm", "changing", "--force").returncode == 0


def test_the_configuration_becomes_a_pipe(pool: PrivateDaemon) -> None:
    file = pool.log_path.parent / "gpupool.toml"
    text = file.read_text()
    with pool.client() as client:
        try:
            file.unlink()
            os.mkfifo(file)
            with pytest.raises(ConfigError, match="is a named pipe, not a regular file"):
                client.reload()
            assert cli(pool, "status").returncode == 0
            file.unlink()
            file.write_text(text + "\n[a]\nb = " + "[" * 50_000)
            with pytest.raises(ConfigError, match="is not valid TOML: nested more than 32"):
                client.reload()
        finally:
            file.unlink()
            file.write_text(text)
        client.reload()


def test_a_daemon_whose_configuration_is_a_pipe_ends_at_sigterm(tmp_path: Path) -> None:
    with private_daemon('devices = ["sim:H800"]', tmp_path) as daemon:
        file = tmp_path / "gpupool.toml"
        file.unlink()
        os.mkfifo(file)
        with daemon.client() as client, pytest.raises(ConfigError):
            client.reload()
        assert cli(daemon, "status").returncode == 0
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(120) == 0
        started = run_daemon(["--config", str(file)], child_env())
        assert started.returncode == ConfigError.exit_code
        assert "is a named pipe, not a regular file" in started.stderr
