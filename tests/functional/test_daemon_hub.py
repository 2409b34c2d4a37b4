"""Models of a hub: vLLM looks at the small files first, and only then the rest is fetched."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import AddModelRequest, ModelInfo
from gpupoold.errors import Refused
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    emulated_config,
    private_daemon,
    weight_bytes,
)
from tests.unit.checkpoints.fake_hub import FakeHub, run_hub

_ENDPOINT = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE")
_MAX_LOOK_BYTES = 1 << 18


@pytest.fixture(scope="module")
def hub(tiny_models: dict[str, Path]) -> Iterator[FakeHub]:
    """A hub with a tiny model, and with configurations that vLLM does not accept."""
    files = {path.name: path.read_bytes() for path in tiny_models[LLAMA].iterdir()}

    def changed(**changes: Any) -> dict[str, bytes]:
        config = json.loads(files["config.json"]) | changes
        return files | {"config.json": json.dumps(config).encode()}

    with run_hub() as hub:
        hub.add("org/good", files)
        hub.add("org/unknown", changed(architectures=["NoSuchForCausalLM"], model_type="no-such"))
        hub.add("org/method", changed(quantization_config={"quant_method": "no-such-method"}))
        hub.add("org/cached", files)
        hub.add("org/aside", files)
        yield hub


@pytest.fixture(scope="module")
def daemon(
    hub: FakeHub, device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    with pytest.MonkeyPatch.context() as patch:
        for name in _ENDPOINT:
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", hub.url)
        shared = tmp_path_factory.mktemp("shared")
        patch.setenv("HF_HUB_CACHE", str(shared))
        patch.setenv("HF_XET_CACHE", str(shared / "xet"))
        snapshot_download("org/cached", cache_dir=shared, endpoint=hub.url)
        with private_daemon(emulated_config(device_bytes), tmp_path_factory.mktemp("hub")) as made:
            yield made


@pytest.mark.slow
def test_a_snapshot_of_a_shared_cache_is_used_in_place(daemon: PrivateDaemon, hub: FakeHub) -> None:
    hub.requests.clear()
    model = added(daemon, "org/cached", check_only=True)
    assert "/models--org--cached/snapshots/" in model.path
    assert not hub.requests


def test_detached_through_xet_storage(
    daemon: PrivateDaemon, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "has_xet", True)
    hub.requests.clear()
    request = AddModelRequest(name="aside", source="org/aside", detach=True, **LOAD_OPTIONS)
    with daemon.client() as client:
        *_, last = client.add_model(request)
        assert last.stage == "detached"
        seen: set[str] = set()
        deadline = time.monotonic() + 120
        while [model.name for model in client.models() if model.state == "ready"] != ["aside"]:
            seen |= {one.stage for one in client.ps().additions}
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.remove_model("aside", "force")
    assert "load" in seen
    assert hub.xet_downloads()
    assert weight_bytes_sent(hub) <= _MAX_LOOK_BYTES


def added(daemon: PrivateDaemon, source: str, *, check_only: bool = False) -> ModelInfo:
    request = AddModelRequest(name="new", source=source, check_only=check_only, **LOAD_OPTIONS)
    with daemon.client() as client:
        *_, last = client.add_model(request)
    assert last.model is not None
    return last.model


def weight_bytes_sent(hub: FakeHub) -> int:
    return sum(one.sent_bytes for one in hub.downloads("model.safetensors"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("org/unknown", "NoSuchForCausalLM|no-such"),
        pytest.param("org/method", "no-such-method", marks=pytest.mark.slow),
    ],
)
def test_vllm_refuses_before_the_weights(
    daemon: PrivateDaemon, hub: FakeHub, source: str, reason: str
) -> None:
    hub.requests.clear()
    with pytest.raises(Refused, match=reason) as caught:
        added(daemon, source)
    assert caught.value.hint
    assert weight_bytes_sent(hub) <= _MAX_LOOK_BYTES


def test_a_check_then_a_model(
    daemon: PrivateDaemon, hub: FakeHub, tiny_models: dict[str, Path]
) -> None:
    hub.requests.clear()
    checked = added(daemon, "org/good", check_only=True)
    assert weight_bytes_sent(hub) <= _MAX_LOOK_BYTES
    model = added(daemon, "org/good")
    size = weight_bytes(tiny_models[LLAMA])
    assert size < weight_bytes_sent(hub) < size + 2 * _MAX_LOOK_BYTES + size // 10
    assert (model.state, model.architecture) == ("ready", checked.architecture)
    assert model.weight_bytes >= checked.weight_bytes > 0
