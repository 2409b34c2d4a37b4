"""API keys in the database: made, changed, rotated, revoked, used."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool_state import ApiKeys, Database, KeyUse
from gpupoold.api_keys import KeyPowers
from gpupoold.errors import NoSuchKey, Refused, UsageError

pytestmark = pytest.mark.asyncio

POWERS = KeyPowers(
    models=("qwen", "org/llama"),
    priority="low",
    requests_per_minute=60,
    tokens_per_minute=10_000,
    max_live=4,
    expires_at=2e9,
)


class Clock:
    def __init__(self) -> None:
        self.at = 1_700_000_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(db: Database, clock: Clock) -> ApiKeys:
    return ApiKeys(db, now=clock)


async def test_key_is_kept_as_it_was_given(keys: ApiKeys, path: Path) -> None:
    row = await keys.add("Id000001", "web", "digest", POWERS)
    assert (row.id, row.name, row.digest, row.powers) == ("Id000001", "web", "digest", POWERS)
    assert (row.created_at, row.last_used_at, row.num_requests) == (1_700_000_000.0, None, 0)
    async with await Database.open(path) as other:
        assert await ApiKeys(other).list() == [row]


async def test_no_models_are_not_all_models(keys: ApiKeys) -> None:
    none = await keys.add("Id000001", "none", "a", KeyPowers(models=()))
    everything = await keys.add("Id000002", "all", "b", KeyPowers())
    assert none.powers.models == ()
    assert everything.powers.models is None


async def test_name_belongs_to_one_key_until_that_is_revoked(keys: ApiKeys, clock: Clock) -> None:
    await keys.add("Id000001", "web", "old", KeyPowers())
    with pytest.raises(Refused, match="'web' exists"):
        await keys.add("Id000002", "web", "new", KeyPowers())
    clock.at += 5
    await keys.revoke("web")
    await keys.add("Id000002", "web", "new", KeyPowers())
    assert [row.id for row in await keys.list()] == ["Id000002"]
    [_, gone] = await keys.list(with_revoked=True)
    assert (gone.id, gone.digest, gone.revoked_at) == ("Id000001", "", clock.at)


@pytest.mark.parametrize("name", ["", "two words", "-x", "x" * 65, "\ud800"], ids=ascii)
async def test_names_that_cannot_be_kept(keys: ApiKeys, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        await keys.add("Id000001", name, "digest", KeyPowers())
    assert await keys.list() == []


async def test_unknown_names(keys: ApiKeys) -> None:
    await keys.add("Id000001", "web", "digest", KeyPowers())
    await keys.revoke("web")
    for call in (
        keys.revoke("web"),
        keys.rotate("web", "new", None),
        keys.set("web", POWERS),
        keys.set("\ud800", POWERS),
    ):
        with pytest.raises(NoSuchKey, match="no API key is named"):
            await call


async def test_rotation_keeps_the_old_secret_until_it_is_told(keys: ApiKeys, clock: Clock) -> None:
    await keys.add("Id000001", "web", "first", POWERS)
    clock.at += 10
    row = await keys.rotate("web", "second", clock.at + 60)
    assert (row.digest, row.previous_digest) == ("second", "first")
    assert (row.previous_until, row.rotated_at) == (clock.at + 60, clock.at)
    assert (row.powers, row.id) == (POWERS, "Id000001")
    row = await keys.rotate("web", "third", None)
    assert (row.digest, row.previous_digest, row.previous_until) == ("third", None, None)


async def test_powers_are_replaced(keys: ApiKeys) -> None:
    await keys.add("Id000001", "web", "digest", POWERS)
    row = await keys.set("web", KeyPowers(priority="high"))
    assert row.powers == KeyPowers(priority="high")
    assert row.digest == "digest"


async def test_use_adds_up(keys: ApiKeys) -> None:
    await keys.add("Id000001", "web", "digest", KeyPowers())
    await keys.note_use([KeyUse("Id000001", 2, 30, 5.0), KeyUse("unknown1", 1, 1, 6.0)])
    await keys.note_use([KeyUse("Id000001", 1, 12, 7.0)])
    [row] = await keys.list()
    assert (row.num_requests, row.num_tokens, row.last_used_at) == (3, 42, 7.0)
