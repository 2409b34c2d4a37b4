"""Conversations of a whole daemon go on after the end of a worker, elsewhere, and of the daemon."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx

from benchmarks.bench.rig import emulated_config
from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_access import AddKeyRequest
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    private_daemon,
    ps,
    until,
    usage,
    weight_bytes,
)

_PROMPT_TOKENS, _MAX_TOKENS = 150, 8
_BLOCK_TOKENS = 16


class Conversation:
    """Prompts of token ids, and the answers to them."""

    def __init__(self, seed: int) -> None:
        self.token_ids = [300 + (seed * 977 + 31 * n) % 1500 for n in range(_PROMPT_TOKENS)]

    def turn(self, daemon: PrivateDaemon) -> int:
        """Ask for more; return the cached tokens of the prompt."""
        body = {
            "model": LLAMA,
            "prompt": self.token_ids,
            "max_tokens": _MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{daemon.http_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        self.token_ids += answer.json()["choices"][0]["token_ids"]
        self.token_ids += [400 + len(self.token_ids) % 700] * 4
        return int(answer.headers["x-gpupool-cached-tokens"])

    def check_no_stranger_has_it(self, daemon: PrivateDaemon) -> None:
        """A new key asks for the whole conversation and finds nothing of it."""
        with daemon.client() as client:
            key = client.add_key(AddKeyRequest(name=f"stranger-{time.monotonic_ns()}")).text
        body = {"model": LLAMA, "prompt": self.token_ids, "max_tokens": 1}
        answer = httpx.post(
            f"{daemon.http_url}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-gpupool-cached-tokens"] == "0"

    @property
    def least_cached(self) -> int:
        """The tokens of whole blocks that earlier turns have computed."""
        return (len(self.token_ids) - 6) // _BLOCK_TOKENS * _BLOCK_TOKENS


def config(tiny_models: dict[str, Path]) -> str:
    num_bytes = int(1.6 * weight_bytes(tiny_models[LLAMA]))
    memory = '[memory]\nkv_host = "64MiB"\nkv_files = "64MiB"\n'
    return 2 * emulated_config(num_bytes) + memory


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "state" / "kv").rglob("*") if path.is_file()]


def device_of(daemon: PrivateDaemon, number: int, *, drains: bool) -> None:
    with daemon.client() as client:
        (client.drain if drains else client.undrain)(number)


def test_it_goes_on(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    conversation, folder = Conversation(1), tmp_path / "box"
    with private_daemon(config(tiny_models), folder) as daemon:
        daemon.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
        until(lambda: all(one.num_engines == 1 for one in ps(daemon).devices))
        device_of(daemon, 1, drains=True)
        assert conversation.turn(daemon) == 0
        until(lambda: bool(files(folder)))
        # After the death of the worker, from the memory that it leaves.
        pid = ps(daemon).devices[0].pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: ps(daemon).devices[0].pid not in (pid, None), 60)
        until(lambda: ps(daemon).devices[0].num_engines == 1, 60)
        conversation.check_no_stranger_has_it(daemon)
        assert conversation.turn(daemon) >= conversation.least_cached - 32
        until(lambda: usage(daemon, LLAMA).prefix_hit_bytes > 0)
        assert usage(daemon, LLAMA).prefix_file_bytes == 0
        # On the other device, from the memory of this one.
        device_of(daemon, 1, drains=False)
        device_of(daemon, 0, drains=True)
        assert conversation.turn(daemon) > _PROMPT_TOKENS
        until(lambda: usage(daemon, LLAMA).prefix_peer_bytes > 0)
        conversation.check_no_stranger_has_it(daemon)
    # After a restart of the daemon, from files.
    with private_daemon(config(tiny_models), folder) as daemon:
        until(lambda: any(one.num_engines == 1 for one in ps(daemon).devices), 60)
        conversation.check_no_stranger_has_it(daemon)
        assert conversation.turn(daemon) > _PROMPT_TOKENS
        until(lambda: usage(daemon, LLAMA).prefix_file_bytes > 0)
        assert files(folder)
        # The model's KV goes with the model.
        with daemon.client() as client:
            client.remove_model(LLAMA)
        assert not files(folder)
        daemon.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
        undisturbed = Conversation(1)
        assert undisturbed.turn(daemon) == 0
        for _ in range(3):
            undisturbed.turn(daemon)
    assert conversation.token_ids == undisturbed.token_ids
