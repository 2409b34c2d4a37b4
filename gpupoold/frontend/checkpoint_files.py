"""Finished downloads of checkpoints, for other nodes of the fleet; see :mod:`.checkpoints.peers`.

Requests must be signed with the fleet's secret; API keys do not count here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from starlette.responses import FileResponse, Response

from gpupoold.access.fleet import HEADER, sign
from gpupoold.checkpoints.download import finished_downloads
from gpupoold.checkpoints.manifest import Manifest
from gpupoold.checkpoints.peers import LISTING_METHOD, PATH, Listing
from gpupoold.checkpoints.resolve import is_hub_id
from gpupoold.frontend.errors import method_not_allowed, no_such_path, unauthorised
from gpupoold.frontend.fleet_calls import FleetCalls
from gpupoold.frontend.mounts import Receive, Scope, Send


class CheckpointFiles:
    """Serves the daemon's downloads."""

    def __init__(self, calls: FleetCalls) -> None:
        self._calls = calls

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a path below :data:`PATH`.

        Raises:
            ApiError: 401 without the fleet's signature; 404 for anything but finished downloads.
        """
        path, method = scope["path"], scope["method"]
        if method != "GET":
            raise method_not_allowed(method, path, ("GET",))
        call = self._calls.find(scope)
        if call is None:
            raise unauthorised("Checkpoints are served to nodes of the fleet only.")
        call.opened(b"")
        org, _, rest = path.removeprefix(PATH).partition("/")
        name, _, rest = rest.partition("/")
        commit, _, file = rest.partition("/")
        folder, repo_id = self._calls.downloads, f"{org}/{name}"
        if not folder or not is_hub_id(repo_id):
            raise no_such_path(method, path)
        found = await asyncio.to_thread(finished_downloads, Path(folder), repo_id)
        response = self._listing(scope, found) if not commit else _file(found, commit, file)
        if response is None:
            raise no_such_path(method, path)
        await response(scope, receive, send)

    def _listing(self, scope: Scope, found: dict[Path, Manifest]) -> Response | None:
        query = scope.get("query_string", b"").decode("latin-1")
        revision = parse_qs(query).get("revision", [None])[0]
        for manifest in found.values():
            if manifest.revision == revision:
                body = msgspec.json.encode(Listing(manifest.commit, list(manifest.files)))
                target = f"{scope['path']}{'?' if query else ''}{query}"
                signature = sign(self._calls.secret, LISTING_METHOD, target, body)
                return Response(body, media_type="application/json", headers={HEADER: signature})
        return None


def _file(found: dict[Path, Manifest], commit: str, file: str) -> Response | None:
    for folder, manifest in found.items():
        # Only listed files, so that no path leads elsewhere.
        if manifest.commit == commit and file in {one.path for one in manifest.files}:
            return FileResponse(folder / file, media_type="application/octet-stream")
    return None
