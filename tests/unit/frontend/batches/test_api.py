"""The routes of files and batches: forms, bounds, pages, and what belongs to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from starlette import formparsers

from gpupool_state.batches import BatchRow, BatchStore, FileRow
from gpupoold.config.sections import BatchSettings
from gpupoold.frontend.batches.api import BatchApi
from gpupoold.frontend.batches.files import StoredFiles
from gpupoold.frontend.callers import Caller
from gpupoold.frontend.errors import ApiError, send_error
from gpupoold.frontend.request_context import BytesInFlight
from gpupoold.wire.messages import KeyRecord
from tests.unit.frontend.asgi import Answer, request

pytestmark = pytest.mark.asyncio
BOUNDARY = "b0undary"


class Rig:
    """The routes, asked by callers with the keys ``a`` and ``b``."""

    def __init__(self, store: BatchStore, files: StoredFiles, bounds: BatchSettings) -> None:
        self.store = store
        self.files = files.path("")
        self.api = BatchApi(store, files, bounds, BytesInFlight(10**6))

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        key: str = "a",
        kind: str = "application/json",
        chunks: Iterable[bytes] | None = None,
    ) -> Answer:
        caller = Caller(KeyRecord(key, key, "digest"))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            path, _, query = scope["path"].partition("?")
            try:
                scope = {**scope, "path": path, "query_string": query.encode()}
                await self.api.serve(caller, scope, receive, send)
            except ApiError as error:
                await send_error(send, error)

        parts = [body] if chunks is None else chunks
        return await request(app, method, path, parts, [(b"content-type", kind.encode())])

    async def upload(
        self,
        content: bytes = b"{}",
        key: str = "a",
        purpose: str = "batch",
        name: str = "in.jsonl",
        parameters: str = "",
        **fields: str | bytes,
    ) -> Answer:
        field = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
        form = b""
        for one, value in {"purpose": purpose, **fields}.items():
            text = value.encode() if isinstance(value, str) else value
            form += f'{field}"{one}"\r\n\r\n'.encode() + text + b"\r\n"
        form += f'{field}"file"; filename="{name}"\r\n\r\n'.encode()
        body = form + content + f"\r\n--{BOUNDARY}--\r\n".encode()
        kind = f"multipart/form-data; boundary={BOUNDARY}{parameters}"
        pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
        return await self.call("POST", "/v1/files", key=key, kind=kind, chunks=pieces)

    async def create(self, file_id: str, key: str = "a", **fields: Any) -> Answer:
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions"} | fields
        return await self.call("POST", "/v1/batches", json.dumps(asked).encode(), key)


@pytest.fixture
def rig(store: BatchStore, files: StoredFiles, bounds: BatchSettings) -> Rig:
    return Rig(store, files, bounds)


async def test_a_file_comes_back_as_it_went_in(rig: Rig) -> None:
    content = bytes(range(256)) * 20
    answer = await rig.upload(content, name="x" * 500)
    assert answer.status == 200
    file = answer.json()
    assert (file["bytes"], file["purpose"], len(file["filename"])) == (5120, "batch", 255)
    got = await rig.call("GET", f"/v1/files/{file['id']}/content")
    assert (got.body, got.headers["content-length"]) == (content, "5120")
    assert (await rig.call("GET", f"/v1/files/{file['id']}")).json() == file
    deleted = await rig.call("DELETE", f"/v1/files/{file['id']}")
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert (await rig.call("GET", f"/v1/files/{file['id']}/content")).status == 404


async def test_keys_see_their_own_only(rig: Rig) -> None:
    file_id = (await rig.upload(key="a")).json()["id"]
    batch_id = (await rig.create(file_id)).json()["id"]
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
    ):
        assert (await rig.call(method, path, key="b")).status == 404
    assert (await rig.create(file_id, key="b")).status == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await rig.call("GET", path, key="b")).json()["data"] == []
        assert len((await rig.call("GET", path, key="a")).json()["data"]) == 1


async def test_bounds_of_files(rig: Rig) -> None:
    assert (await rig.upload(bytes(90_000))).status == 413
    for _ in range(4):
        assert (await rig.upload(bytes(9_000), key="a")).status == 200
    answer = await rig.upload(bytes(9_000), key="a")
    assert (answer.status, "retry-after" in answer.headers) == (429, True)
    for key in "bcdefghijklm":
        await rig.upload(bytes(9_000), key=key)
    assert (await rig.upload(bytes(9_000), key="z")).status == 429
    assert 90_000 < await rig.store.num_bytes() <= 100_000
    assert len(await rig.store.file_ids()) == len(list(rig.files.iterdir()))


async def test_small_files_count_as_blocks_and_their_number_is_bounded(rig: Rig) -> None:
    assert (await rig.upload(b"x")).status == 200
    account = await rig.store.account("a")
    assert 4096 < account.num_bytes < 5000
    for _ in range(5):
        assert (await rig.upload(b"x")).status == 200
    answer = await rig.upload(b"x")
    assert (answer.status, "number is at most 6" in answer.json()["error"]["message"]) == (
        429,
        True,
    )
    assert len(list(rig.files.iterdir())) == 6
    assert (await rig.upload(b"x", key="b")).status == 200


async def test_batches_count_with_their_metadata_and_their_number_is_bounded(rig: Rig) -> None:
    file_id = (await rig.upload()).json()["id"]
    await rig.upload()
    metadata = {f"k{number}": "\N{GRINNING FACE}" * 512 for number in range(16)}
    had = (await rig.store.account("a")).num_bytes
    answer = await rig.create(file_id, metadata=metadata)
    assert answer.status == 429  # 33 KB beside two files, of 40 KB
    assert (await rig.store.account("a")).num_bytes == had
    metadata = {"k": "\N{GRINNING FACE}" * 512}
    for number in range(5):
        batch = (await rig.create(file_id, metadata=metadata)).json()
        assert batch["metadata"] == metadata
        had += 2048
        assert (await rig.store.account("a")).num_bytes > had
        await rig.store.end(batch["id"], "failed", number, [])
    assert (await rig.create(file_id)).status == 429
    await rig.store.remove_old(3)
    assert (await rig.create(file_id)).status == 200


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data; boundary=b0undary"),
        (b"no form", "multipart/form-data; boundary=b0undary"),
        (b"no form", "multipart/form-data"),
        (b"{}", "application/json"),
        (b"file=x&purpose=batch", "application/x-www-form-urlencoded"),
        (b"--b0undary\r\n" * 1000, "multipart/form-data; boundary=b0undary"),
        (b"", f"multipart/form-data; boundary={'x' * 71}"),
        (b"", 'multipart/form-data; boundary=x; a="' + ";" * 60_000),
    ],
)
async def test_no_form(rig: Rig, body: bytes, kind: str) -> None:
    assert (await rig.call("POST", "/v1/files", body, kind=kind)).status == 400
    assert await rig.store.file_ids() == set()


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "utf-16", "hex", "x" * 100])
async def test_a_charset_of_the_client_is_not_used(
    rig: Rig, charset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    decode = formparsers._user_safe_decode

    def decode_and_note(src: bytes, codec: str) -> str:
        used.append(codec)
        return decode(src, codec)

    monkeypatch.setattr(formparsers, "_user_safe_decode", decode_and_note)
    answer = await rig.upload(parameters=f"; charset={charset}", note=b"e28h" + b"a" * 900)
    assert answer.status == 200
    assert set(used) == {"utf-8"}


@pytest.mark.parametrize(
    "fields",
    [
        {"note": b"e28h" + b"a" * 65_000},
        {f"f{number}": b"x" for number in range(20)},
        {f"expires_after[{name}]": "\udcff".encode(errors="surrogateescape") for name in "ab"},
    ],
)
async def test_fields_are_few_and_short(rig: Rig, fields: dict[str, Any]) -> None:
    status = (await rig.upload(**fields)).status
    assert status == (200 if len(fields) == 2 else 400)


async def test_another_purpose(rig: Rig) -> None:
    answer = await rig.upload(purpose="fine-tune")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "purpose")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "1s"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "9" * 5000}, "completion_window"),
        ({"completion_window": "24h" + " " * 5000}, "completion_window"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "output_expires_after.seconds",
        ),
        ({"metadata": {str(k): "" for k in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": [1]}, None),
        ({"input_file_id": 1}, None),
    ],
)
async def test_a_wrong_batch(rig: Rig, fields: dict[str, Any], param: str | None) -> None:
    file_id = (await rig.upload()).json()["id"]
    answer = await rig.create(file_id, **fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert await rig.store.under_way() == []


async def test_a_batch_under_way_keeps_its_file(rig: Rig) -> None:
    file_id = (await rig.upload()).json()["id"]
    batch = (await rig.create(file_id, completion_window="2h", metadata={"k": "v"})).json()
    assert (batch["status"], batch["metadata"]) == ("validating", {"k": "v"})
    assert batch["expires_at"] - batch["created_at"] == 7200
    assert (await rig.call("DELETE", f"/v1/files/{file_id}")).status == 409
    path = f"/v1/batches/{batch['id']}/cancel"
    assert (await rig.call("POST", path)).json()["status"] == "cancelling"
    assert (await rig.call("POST", path)).status == 200
    await rig.store.end(batch["id"], "completed", 5, [])
    assert (await rig.call("POST", path)).status == 409
    ended = (await rig.call("GET", f"/v1/batches/{batch['id']}")).json()
    assert (ended["completed_at"], ended["cancelled_at"]) == (5, None)
    assert (await rig.call("DELETE", f"/v1/files/{file_id}")).status == 200


async def test_pages(rig: Rig) -> None:
    ids = []
    for _ in range(5):
        ids.append((await rig.upload()).json()["id"])
        await asyncio.sleep(0)
    first = (await rig.call("GET", "/v1/files?limit=2")).json()
    assert (first["has_more"], first["last_id"]) == (True, first["data"][1]["id"])
    second = (await rig.call("GET", f"/v1/files?limit=3&after={first['last_id']}")).json()
    assert second["has_more"] is False
    found = [one["id"] for one in first["data"] + second["data"]]
    assert sorted(found) == sorted(ids)
    for query in ("limit=0", "limit=10001", "limit=x", "&".join(f"a{k}=1" for k in range(50))):
        assert (await rig.call("GET", f"/v1/files?{query}")).status == 400
    assert (await rig.call("GET", "/v1/files?order=up")).status == 400
    assert (await rig.call("GET", "/v1/batches?limit=101")).status == 400


async def test_lists_as_openai_has_them(rig: Rig, store: BatchStore) -> None:
    for number in range(40):
        purpose = "batch_output" if number % 2 else "batch"
        await store.add_file(FileRow(f"f{number:02}", "a", purpose, "in", 1, number))

    async def listed(query: str) -> list[str]:
        answer = await rig.call("GET", f"/v1/files?{query}")
        return [one["id"] for one in answer.json()["data"]]

    assert len(await listed("")) == len(await listed("limit=10000")) == 40
    assert (await listed("order=asc"))[:2] == ["f00", "f01"]
    assert (await listed("order=asc&after=f30&limit=2")) == ["f31", "f32"]
    assert (await listed("purpose=batch_output&limit=2")) == ["f39", "f37"]
    assert (await listed("purpose=fine-tune")) == []


async def test_pages_of_batches_are_bounded_in_bytes(rig: Rig, store: BatchStore) -> None:
    metadata = {f"k{number}": "\N{GRINNING FACE}" * 512 for number in range(16)}
    for number in range(12):
        row = BatchRow(
            f"b{number:02}",
            "/v1/completions",
            number,
            9,
            owner="a",
            input_file_id="f",
            completion_window="1h",
            metadata=metadata,
        )
        await store.add_batch(row)
    found: list[str] = []
    answers = 0
    while len(found) < 12:
        after = f"&after={found[-1]}" if found else ""
        answer = await rig.call("GET", f"/v1/batches?limit=100{after}")
        assert len(answer.body) < 400_000
        found += [one["id"] for one in answer.json()["data"]]
        assert answer.json()["has_more"] == (len(found) < 12)
        answers += 1
    assert (found, answers) == ([f"b{number:02}" for number in reversed(range(12))], 4)


async def test_files_expire(rig: Rig, store: BatchStore) -> None:
    expiry: dict[str, Any] = {
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": "3600",
    }
    file = (await rig.upload(**expiry)).json()
    assert file["expires_at"] == file["created_at"] + 3600
    assert "expires_at" not in (await rig.upload()).json()
    await store.add_file(FileRow("old", "a", "batch", "in", 1, 5, 3605))
    assert (await rig.call("GET", "/v1/files/old")).status == 404
    assert len((await rig.call("GET", "/v1/files")).json()["data"]) == 2
    assert [row.id for row in await store.old_files(before=0)] == ["old"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"}, "seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e4"}, "seconds"),
        ({"expires_after[anchor]": "created_at"}, "seconds"),
        ({"expires_after[seconds]": "3600"}, "anchor"),
    ],
)
async def test_a_wrong_expiry(rig: Rig, fields: dict[str, Any], param: str) -> None:
    answer = await rig.upload(**fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, f"expires_after.{param}")
    assert await rig.store.file_ids() == set()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/v1/files", 404),
        ("DELETE", "/v1/files", 404),
        ("POST", "/v1/files/file-1/content", 404),
        ("GET", "/v1/files/file-1/other", 404),
        ("DELETE", "/v1/batches/batch_1", 404),
        ("GET", "/v1/batches/../files/x", 404),
        ("GET", "/v1/files/..%2f", 404),
        ("POST", "/v1/batches/batch_1/cancel/x", 404),
    ],
)
async def test_other_paths(rig: Rig, method: str, path: str, status: int) -> None:
    """The router answers other methods with 405 before."""
    assert (await rig.call(method, path)).status == status
