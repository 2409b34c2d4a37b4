"""Steps do not read torch's default dtype, which vLLM changes while it loads another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families.make import make_family
from benchmarks.families.prompts import SIZES, prompt_of
from benchmarks.families.table import FAMILIES, family_named
from tests.conftest import ROOT
from tests.functional.daemon_tools import weight_bytes
from tests.functional.worker_peer import WorkerPeer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPARE_BYTES = 64 << 20
NUM_TOKENS = 32
UNSUPPORTED = {"llama-fp8", "phimoe"}
"""By vLLM's CPU build."""
NAMES = [family.name for family in FAMILIES if family.name not in UNSUPPORTED]


@pytest.mark.parametrize("name", NAMES)
def test_answers_stay_the_same(name: str, tmp_path: Path) -> None:
    """Of prompts, and of the self-check after each switch, which pooling models have too."""
    family, folder = family_named(name), ROOT / "build" / "families"
    folder.mkdir(parents=True, exist_ok=True)
    path = make_family(family, folder)
    drafts = family.speculative_config(path)
    options: dict[str, Any] = {"dtype": family.dtype, "max_model_len": family.max_model_len}
    if drafts:
        options["engine"] = {"speculative_config": json.dumps(drafts)}
    log_path = tmp_path / "worker.log"
    peer = WorkerPeer(
        4 * weight_bytes(path) + SPARE_BYTES, self_check_interval=1, log_path=log_path
    )

    def answers(default: str) -> list[list[int]]:
        peer.call("page_out", model=name)  # so that the self-check is due
        task: dict[str, Any] = {} if family.generates else {"task": family.task}
        for index in range(len(SIZES)):
            request_id, ids = f"{default} {index}", prompt_of(index).token_ids
            peer.ask(name, request_id, ids, max_tokens=NUM_TOKENS, cache_salt=default, **task)
            peer.run_until_ended(request_id)
        return [tokens for request_id, tokens in peer.tokens.items() if default in request_id]

    try:
        peer.load(name, path, **options, timeout_s=180.0)
        expected = answers("before")
        former = peer.call("set_default_dtype", dtype="bfloat16")["former"]
        assert former == "float32"
        assert answers("after") == expected
        assert peer.call("set_default_dtype", dtype=former)["former"] == "bfloat16"
        assert not peer.wrong_answers
    finally:
        peer.close()
