"""A pytest plugin for vLLM's own API tests: servers are those of a comparison, not downloads.

Loaded by ``engine_tests.py`` in a process of its own. ``tests.utils`` of vLLM, which starts servers
and imports much for GPUs, is replaced by a module with a :class:`RemoteOpenAIServer` of the same
interface. The settings are a JSON object with ``target``, ``folder`` and ``models``: ``gpupool`` or
``vllm``, a folder for logs, and the folders of the checkpoints that stand for published models, by
the names of these.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from benchmarks.judges.arguments import read_arguments
from benchmarks.judges.engine_tests import SETTINGS
from benchmarks.judges.selection import TRAINED
from benchmarks.judges.servers import Server, running

_KEY = "none"
_TIMEOUT_S = 120.0
_settings: dict[str, Any] = json.loads(os.environ[SETTINGS])
_stack = contextlib.ExitStack()
_servers: list[Server] = []
_serving = contextlib.ExitStack()
_served: dict[str, str] = {}  # at most one URL, by what is served


def _url_of(model: str, words: Sequence[str]) -> str:
    """Return the URL of a server with these arguments; one like the last is used again."""
    if not _servers:
        folder = Path(_settings["folder"])
        _servers.append(_stack.enter_context(running(_settings["target"], folder)))
    checkpoint, wanted = _checkpoint(model), read_arguments(words)
    names = {model}
    if checkpoint.name == TRAINED:
        wanted = wanted.shared()
        names |= {name for name in _settings["models"] if _checkpoint(name) == checkpoint}
    wanted = replace(wanted, max_model_len=min(wanted.max_model_len, _longest(checkpoint)))
    key = f"{wanted.key} {sorted(names)}"
    if key not in _served:
        _serving.close()
        _served.clear()
        serving = _servers[0].serving(checkpoint, sorted({*names, *wanted.names}), wanted)
        _served[key] = _serving.enter_context(serving)
    return _served[key]


def _checkpoint(model: str) -> Path:
    """Return the folder that stands for a published model; skip the test if there is none."""
    if model not in _settings["models"]:
        pytest.skip(f"needs the model {model}")
    return Path(_settings["models"][model])


def _longest(checkpoint: Path) -> int:
    """Return the limit of a context in a checkpoint's files."""
    file = checkpoint / "sentence_bert_config.json"
    if file.exists():
        return int(json.loads(file.read_text())["max_seq_length"])
    return int(json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"])


class RemoteOpenAIServer:
    """Stands for vLLM's class of this name."""

    DUMMY_API_KEY = _KEY

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: object) -> None:
        """Take no environment variables for a server: neither of the two gets any."""
        self._url = _url_of(model, vllm_serve_args)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the server to the next test with the same arguments."""

    @property
    def url_root(self) -> str:
        """The address without a path."""
        return self._url

    def url_for(self, *parts: str) -> str:
        """Return the address of a path."""
        return "/".join([self._url, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client."""
        return openai.OpenAI(base_url=self.url_for("v1"), **_client_options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's asynchronous client."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **_client_options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Return Anthropic's client."""
        return anthropic.Anthropic(base_url=self._url, **_client_options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return Anthropic's asynchronous client."""
        return anthropic.AsyncAnthropic(base_url=self._url, **_client_options(options))


def _client_options(given: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": _KEY, "max_retries": 0, "timeout": _TIMEOUT_S} | given


class _Hub:
    """Stands for the client of the Hugging Face Hub, which cannot be reached."""

    def snapshot_download(self, repo_id: str, **_: object) -> str:
        """Return the folder that stands for a model."""
        return str(_checkpoint(repo_id))


def _as_folder(function: Any) -> Any:
    """Wrap a loader whose first argument, or ``tokenizer_name``, is the name of a model."""

    def load(*arguments: Any, **options: Any) -> Any:
        if arguments and not Path(str(arguments[0])).exists():
            arguments = (_checkpoint(str(arguments[0])), *arguments[1:])
        if "tokenizer_name" in options:
            options["tokenizer_name"] = _checkpoint(options["tokenizer_name"])
        return function(*arguments, **options)

    return load


class HfRunner:
    """Stands for vLLM's class of this name: skips tests that compare with a published model."""

    def __init__(self, *_: object, **__: object) -> None:
        """Skip the test."""
        pytest.skip("compares with the numbers of a published model")


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    """Return the stand-in."""
    return HfRunner


def _replace() -> None:
    """Put the stand-ins in place, before the first test module is imported."""
    import transformers
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils as repo_utils

    stand_in = types.ModuleType("tests.utils")
    vars(stand_in).update(
        RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[], VLLM_PATH=Path.cwd()
    )
    sys.modules["tests.utils"] = stand_in
    conftest = types.ModuleType("tests.conftest")
    vars(conftest).update(HfRunner=HfRunner)
    sys.modules["tests.conftest"] = conftest
    for loader in (transformers.AutoTokenizer, transformers.AutoConfig):
        loader.from_pretrained = _as_folder(loader.from_pretrained)
    vllm.tokenizers.get_tokenizer = _as_folder(vllm.tokenizers.get_tokenizer)
    repo_utils.hf_api = _Hub


def pytest_unconfigure() -> None:
    """Stop the servers."""
    _serving.close()
    _stack.close()


_replace()
