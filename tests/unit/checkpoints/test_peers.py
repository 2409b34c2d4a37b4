"""Downloads from another node of the fleet, which serves its own downloads over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from gpupoold.access.fleet import HEADER, make_secret, sign
from gpupoold.checkpoints import peers as peers_module
from gpupoold.checkpoints.hub import Hub, HubFile
from gpupoold.checkpoints.manifest import read_manifest
from gpupoold.checkpoints.peers import PATH, PeerHub, Peers, Sources
from gpupoold.errors import Failed
from gpupoold.frontend.callers import FleetCalls
from gpupoold.frontend.errors import ApiError, send_error
from gpupoold.frontend.router import CheckpointFiles
from tests.support.quick_server import QuickServer
from tests.unit.checkpoints.download_tools import (
    REPO,
    WEIGHTS,
    assert_complete,
    big_checkpoint,
    fetch,
    visible,
)
from tests.unit.checkpoints.fake_hub import FakeHub

SECRET = make_secret()


@contextmanager
def node(folder: Path, secret: str = SECRET) -> Iterator[str]:
    """The address of a node with downloads in a folder."""
    calls = FleetCalls()
    calls.secret, calls.downloads = secret, str(folder)
    files = CheckpointFiles(calls)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await files.serve(scope, receive, send)
        except ApiError as error:
            await send_error(send, error)

    server = QuickServer(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def files(hub: FakeHub) -> dict[str, bytes]:
    """A repository on the hub."""
    files = big_checkpoint()
    hub.add(REPO, files)
    return files


@pytest.fixture
def peer(hub: FakeHub, files: dict[str, bytes], tmp_path: Path) -> Iterator[str]:
    """A node that has downloaded the repository."""
    fetch(tmp_path / "peer" / REPO.replace("/", "--"))
    hub.requests.clear()
    with node(tmp_path / "peer") as url:
        yield url


def test_weights_come_from_the_peer(
    hub: FakeHub, files: dict[str, bytes], peer: str, tmp_path: Path
) -> None:
    target = fetch(tmp_path / "mine", peers=Peers([peer], SECRET))
    assert visible(target) == files
    assert_complete(target, hub.repos[REPO].revisions["main"])
    assert not hub.downloads(WEIGHTS)
    assert hub.downloads("config.json")


@pytest.mark.parametrize("secret", ["", "ab" * 32])
def test_strangers_get_the_weights_from_the_hub(
    secret: str, hub: FakeHub, files: dict[str, bytes], peer: str, tmp_path: Path
) -> None:
    assert visible(fetch(tmp_path / "mine", peers=Peers([peer], secret))) == files
    assert hub.downloads(WEIGHTS)


def test_damaged_weights_are_replaced_by_the_hubs(
    hub: FakeHub, files: dict[str, bytes], peer: str, tmp_path: Path
) -> None:
    spoilt = tmp_path / "peer" / REPO.replace("/", "--") / WEIGHTS
    spoilt.write_bytes(b"\0" * len(files[WEIGHTS]))
    assert visible(fetch(tmp_path / "mine", peers=Peers([peer], SECRET))) == files
    assert len(hub.downloads(WEIGHTS)) == 1


def test_a_part_is_continued(
    hub: FakeHub, files: dict[str, bytes], peer: str, tmp_path: Path
) -> None:
    hub.cuts[WEIGHTS] = [2_000_000] + [0] * 5
    with pytest.raises(Failed):
        fetch(tmp_path / "mine")
    hub.requests.clear()
    assert visible(fetch(tmp_path / "mine", peers=Peers([peer], SECRET))) == files
    assert not hub.downloads(WEIGHTS)


def test_without_a_hub_all_comes_from_the_peer(
    files: dict[str, bytes], peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Failed, match=r"127\.0\.0\.1:9"):
        fetch(tmp_path / "mine", peers=Peers([peer], make_secret()))
    assert visible(fetch(tmp_path / "mine", peers=Peers([peer], SECRET))) == files
    with pytest.raises(Failed, match=r"127\.0\.0\.1:9"):
        fetch(tmp_path / "other", revision="v2", peers=Peers([peer], SECRET))


def test_a_node_of_another_fleet_lists_nothing(peer: str, tmp_path: Path) -> None:
    with node(tmp_path / "peer", make_secret()) as other:
        for url in (other, "http://127.0.0.1:9"):
            with pytest.raises(Failed):
                PeerHub(REPO, (), url, SECRET).list_files(None)
    assert PeerHub(REPO, (), peer, SECRET).list_files(None)[0]


def test_a_list_of_files_is_bounded(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_LISTING_BYTES", 100)
    with pytest.raises(Failed, match="more than 100 bytes"):
        PeerHub(REPO, (), peer, SECRET).list_files(None)


@pytest.mark.parametrize(("of_hub", "best"), [(5e6, "quick"), (2e6, "quick"), (9e6, None)])
def test_the_quickest_source(
    of_hub: float, best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"slow": 1e6, "quick": 6e6, "dead": 0.0}
    monkeypatch.setattr(peers_module, "_MEASURES_FROM_BYTES", 0)
    monkeypatch.setattr(peers_module, "_rate", lambda hub, *_: rates.get(hub.endpoint, of_hub))
    sources = Sources([PeerHub(REPO, (), name, SECRET) for name in rates])
    sources.measure(Hub(REPO, (), "hub"), "commit", [HubFile(WEIGHTS, 9, "")])
    assert (sources.best.endpoint if sources.best else None) == best


def test_rates_are_measured(hub: FakeHub, peer: str) -> None:
    commit = hub.repos[REPO].revisions["main"]
    for source in (Hub(REPO), PeerHub(REPO, (), peer, SECRET)):
        assert peers_module._rate(source, commit, WEIGHTS) > 0
        assert peers_module._rate(source, commit, "missing") == 0
    assert peers_module._rate(PeerHub(REPO, (), "http://127.0.0.1:9", SECRET), commit, WEIGHTS) == 0


def test_only_finished_downloads_are_served(hub: FakeHub, peer: str, tmp_path: Path) -> None:
    commit = hub.repos[REPO].revisions["main"]
    (tmp_path / "peer" / "secret.txt").write_text("no")

    def get(path: str, method: str = "GET", **changes: str) -> int:
        headers = {HEADER: sign(SECRET, "GET", path, b"")} | changes
        return httpx.request(method, peer + path, headers=headers).status_code

    config = f"{PATH}{REPO}/{commit}/config.json"
    assert get(config) == 200
    assert get(config, "POST") == 405
    assert httpx.get(peer + config).status_code == 401
    assert get(config, **{HEADER: sign(SECRET, "GET", PATH, b"")}) == 401
    for path in (
        f"{PATH}{REPO}/{commit}/../../secret.txt",
        f"{PATH}{REPO}/{commit}/%2e%2e/secret.txt",
        f"{PATH}{REPO}/{'0' * 40}/config.json",
        f"{PATH}{REPO}/{commit}/.gpupool-download.json",
        f"{PATH}org/other/{commit}/config.json",
        f"{PATH}../peer",
        PATH,
    ):
        assert get(path) in (401, 404), path  # a client may change the path, and not sign that
    folder = tmp_path / "peer" / REPO.replace("/", "--")
    manifest = read_manifest(folder)
    assert manifest is not None
    (folder / ".gpupool-download.json").write_text("{}")
    assert get(config) == 404
