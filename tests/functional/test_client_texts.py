"""What clients read about a failed model names nothing of the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import LLAMA, LOAD_OPTIONS

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/tokenize": {"prompt": "x"},
}


@pytest.fixture(scope="module")
def failed(
    shared_pool: PrivateDaemon,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[PrivateDaemon, Path]]:
    """A daemon with a model whose weights have gone, and the model's folder."""
    checkpoint = tmp_path_factory.mktemp("texts") / "secret-folder"
    shutil.copytree(tiny_models[LLAMA], checkpoint)
    shared_pool.add_model("bad", checkpoint, **LOAD_OPTIONS)
    with shared_pool.client() as client:
        client.unload("bad")
        (checkpoint / "model.safetensors").unlink()
        yield shared_pool, checkpoint
        client.remove_model("bad", "force")


def test_no_text_for_clients_names_the_folder(failed: tuple[PrivateDaemon, Path]) -> None:
    daemon, checkpoint = failed
    texts: list[str] = []
    with httpx.Client(base_url=daemon.http_url, timeout=60) as http:
        for is_stream in (True, False):
            for path, body in BODIES.items():
                answer = http.post(path, json={"model": "bad", "stream": is_stream, **body})
                texts.append(answer.text)
                if answer.status_code != 200:
                    assert answer.status_code == 503, answer.text
        texts += [http.get("/v1/models/bad").text, http.get("/v1/models").text]
    for text in texts:
        assert checkpoint.name not in text
        assert str(checkpoint.parent) not in text
    assert any("<path>: has no weights" in text for text in texts)
    assert not any("different models" in text for text in texts)


def test_operators_read_the_whole_reason(failed: tuple[PrivateDaemon, Path]) -> None:
    daemon, checkpoint = failed
    with daemon.client() as client:
        assert str(checkpoint) in str(client.events())
