"""A group of two GPUs: the parts without an engine, then a daemon whose models span both.

On a machine with one GPU all tests are skipped. The larger comparisons are pieces of
``benchmarks/gpu/run.sh``: ``group-tokens``, ``group-kill``, ``group-migration``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.gpu import machine
from benchmarks.groups import ranks_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from tests.functional.daemon_tools import (
    Background,
    api_client,
    ask,
    check_all,
    child_env,
    eventually,
    ps,
    undisturbed,
    until,
)
from tests.gpu.rig import (
    IS_GPU,
    LLAMA,
    LOGS,
    QWEN2,
    SCALE,
    Checkpoints,
    engine_environment,
    limit_s,
    same_tokens,
)

NUM_GPUS = 2
_FOUND = machine.num_gpus() if IS_GPU else NUM_GPUS

pytestmark = [
    pytest.mark.gpu(emulated=True),
    pytest.mark.timeout(limit_s(120)),
    pytest.mark.skipif(
        _FOUND < NUM_GPUS, reason=f"needs {NUM_GPUS} NVIDIA GPUs, and this machine has {_FOUND}"
    ),
]

MODELS = (LLAMA, QWEN2)
NUM_TOKENS = 60
NUM_LONG = 400
MAX_LEN = 1000
ASKED = [(LLAMA, "one rank"), (QWEN2, "another rank"), (LLAMA, "both of them")]
BACK_S = limit_s(100)


def test_ranks_join_and_carry_out_orders(tmp_path: Path) -> None:
    """Process groups, pinned parts, pages below constant addresses, sums in a graph, copies."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.gpu.group_start", "--name", "group-start"]
    command += ["--out", str(out), "--scratch", str(tmp_path), "--gpus", str(NUM_GPUS)]
    command += ["--dry-run", SCALE.kind]
    done = subprocess.run(
        command, env=child_env(), capture_output=True, text=True, timeout=limit_s(110), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())["figures"]
    for name in ("group2_sums_differing", "group2_parts_differing"):
        assert figures[name]["measured"] == 0, name


@pytest.fixture(scope="module")
def daemon(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A group with room for one model and a half."""
    folder = tmp_path_factory.mktemp("group")
    memory = int(1.7 * checkpoints.largest_bytes) // NUM_GPUS + SCALE.reserve_bytes
    config = f'[[device]]\nkind = "{SCALE.kind}"\nmemory = {memory}\n'
    config += f"gpus = [0, 1]\npage_bytes = {SCALE.page_bytes}\n" if IS_GPU else "gpus = 2\n"
    config += f'[memory]\nreserve = {SCALE.reserve_bytes}\nmodel_cache = "4GiB"\n'
    config += 'kv_host = "512MiB"\n[scheduling]\nquota_max = "50ms"\n'
    with contextlib.ExitStack() as stack:
        stack.enter_context(LOGS.watching(folder))
        environment = engine_environment(is_batch_invariant=True)
        stack.enter_context(mock.patch.dict(os.environ, environment))
        started = stack.enter_context(private_daemon(config, folder))
        for name in MODELS:
            options = {"dtype": SCALE.dtype, "max_model_len": MAX_LEN}
            started.add_model(name, checkpoints.path(name), **options)
        until(lambda: all(one.state == "ready" for one in ps(started).models), BACK_S)
        yield started


@pytest.mark.timeout(limit_s(300))  # with the start of the daemon
async def test_streams_of_a_group_are_as_undisturbed(daemon: PrivateDaemon) -> None:
    async with api_client(daemon.http_url) as api:
        expected = await undisturbed(api, ASKED, NUM_TOKENS)
        together = await asyncio.gather(*(ask(api, *one, NUM_TOKENS) for one in ASKED))
        for one, other, (model, _) in zip(together, expected, ASKED, strict=True):
            same_tokens(one.token_ids, other.token_ids, model)
    with daemon.client() as client:
        assert any(switch.weight_bytes for switch in client.switches(100))
    check_all(daemon)


@pytest.mark.timeout(limit_s(300))
async def test_streams_go_on_when_a_rank_is_killed(daemon: PrivateDaemon) -> None:
    async with api_client(daemon.http_url) as api:
        expected = await undisturbed(api, ASKED, NUM_LONG)
        streams = [Background(api, model, text, NUM_LONG) for model, text in ASKED]
        for stream in streams:
            await stream.started()
        before = ranks_of(daemon)
        assert len(before) == NUM_GPUS
        os.kill(before[-1], signal.SIGKILL)
        for stream, other, (model, _) in zip(streams, expected, ASKED, strict=True):
            same_tokens((await stream.finished()).token_ids, other.token_ids, model)
        await eventually(lambda: {one.state for one in ps(daemon).devices} == {"ready"}, BACK_S)
        assert not set(before) & set(ranks_of(daemon))
    check_all(daemon)
