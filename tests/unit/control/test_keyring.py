"""API keys in the daemon: what the frontends are told, what is counted, who is warned."""

from __future__ import annotations

from typing import Self

import pytest
import pytest_asyncio

from gpupool_state import ApiKeys, Database, History, Registry
from gpupoold.access.secret import matches
from gpupoold.api_keys import KeyPowers
from gpupoold.config.sections import AccessSettings
from gpupoold.control.access import Keyring
from gpupoold.domain import ModelName, ModelSpec
from gpupoold.errors import Failed, NoSuchKey, NoSuchModel
from gpupoold.wire import messages as m

NEEDED = "the API listens at 10.0.0.1 port 8000, beyond this machine, so it needs API keys"


class Clock:
    """Both clocks of the keyring."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Frontend:
    def __init__(self) -> None:
        self.rules: list[m.AccessRules] = []

    def send(self, message: m.Message) -> None:
        assert isinstance(message, m.AccessRules)
        self.rules.append(message)


class Ring:
    """A keyring over a database of its own."""

    def __init__(
        self, keyring: Keyring, frontend: Frontend, store: ApiKeys, history: History, clock: Clock
    ) -> None:
        self.clock = clock
        self.frontend = frontend
        self.history = history
        self.store = store
        self.keyring = keyring

    @classmethod
    async def make(cls, database: Database, history: History, because: str = NEEDED) -> Self:
        frontend, clock = Frontend(), Clock()
        keyring = Keyring(database, history, frontend.send, AccessSettings(), because, clock, clock)
        await keyring.load()
        return cls(keyring, frontend, keyring._store, history, clock)

    @property
    def told(self) -> dict[str, m.KeyRecord]:
        """The keys of the latest rules, by name."""
        return {key.name: key for key in self.frontend.rules[-1].keys}

    async def events(self, kind: str) -> list[str]:
        return [row.message for row in await self.history.events_after(0) if row.kind == kind]


@pytest_asyncio.fixture
async def ring(database: Database, history: History) -> Ring:
    return await Ring.make(database, history)


async def test_frontend_is_told_of_each_change(ring: Ring) -> None:
    keyring = ring.keyring
    row, text = await keyring.add("web", KeyPowers(priority="high", requests_per_minute=9))
    told = ring.told["web"]
    assert matches(text, told.digest)
    assert (told.id, told.priority, told.is_rate_limited) == (row.id, "high", True)
    assert ring.frontend.rules[-1].are_required
    await keyring.set("web", KeyPowers(models=()))
    assert (ring.told["web"].models, ring.told["web"].is_rate_limited) == ((), False)
    _, new = await keyring.rotate("web", 60)
    assert matches(new, ring.told["web"].digest)
    assert matches(text, ring.told["web"].previous_digest)
    assert ring.told["web"].previous_until == ring.clock.now_s + 60
    await keyring.rotate("web", 0)
    assert ring.told["web"].previous_digest == ""
    await keyring.revoke("web")
    assert ring.told == {}
    kinds = ["key_added", "key_changed", "key_rotated", "key_revoked"]
    assert [len(await ring.events(kind)) for kind in kinds] == [1, 1, 2, 1]


async def test_keys_are_there_again_after_a_restart(
    ring: Ring, database: Database, history: History
) -> None:
    _, text = await ring.keyring.add("web", KeyPowers())
    again = await Ring.make(database, history, "")
    again.keyring.publish()
    assert matches(text, again.told["web"].digest)
    assert not again.frontend.rules[-1].are_required
    assert again.keyring.num_valid == 1


async def test_models_are_kept_by_name(ring: Ring, database: Database) -> None:
    spec = ModelSpec(ModelName("qwen"), "q", "/q", aliases=("chat",))
    await Registry(database).add(spec)
    row, _ = await ring.keyring.add("web", KeyPowers(models=("chat", "qwen")))
    assert row.powers.models == ("qwen",)
    with pytest.raises(NoSuchModel, match="'qwne'"):
        await ring.keyring.set("web", KeyPowers(models=("qwne",)))
    with pytest.raises(NoSuchModel):
        await ring.keyring.add("other", KeyPowers(models=("qwne",)))
    with pytest.raises(NoSuchKey):
        await ring.keyring.find("other")


async def test_use_is_counted_and_written(ring: Ring) -> None:
    row, _ = await ring.keyring.add("web", KeyPowers())
    ring.keyring.used(row.id, num_requests=1)
    ring.keyring.used(row.id, num_tokens=30)
    ring.keyring.used("", num_requests=1)  # without a key
    [kept] = await ring.store.list()
    assert kept.num_requests == 0
    [kept] = await ring.keyring.list()
    assert (kept.num_requests, kept.num_tokens) == (1, 30)
    assert kept.last_used_at is not None
    await ring.keyring.revoke("web")
    ring.keyring.used(row.id, num_tokens=5)
    [kept] = await ring.keyring.list(with_revoked=True)
    assert kept.num_tokens == 35


async def test_use_waits_for_a_disk_that_has_room_again(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, _ = await ring.keyring.add("web", KeyPowers())
    ring.keyring.used(row.id, num_requests=1, num_tokens=5)

    async def full(_: object) -> None:
        ring.keyring.used(row.id, num_requests=1)
        raise Failed("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ring.store, "note_use", full)
        await ring.keyring.save()
    [kept] = await ring.keyring.list()
    assert (kept.num_requests, kept.num_tokens) == (2, 5)


async def test_rates_are_those_of_the_key_whoever_asks(
    ring: Ring, database: Database, history: History
) -> None:
    row, _ = await ring.keyring.add("web", KeyPowers(requests_per_minute=2, tokens_per_minute=60))
    ask = m.AskRate(7, row.id)
    assert [ring.keyring.begin(ask).wait_s for _ in range(2)] == [0, 0]
    refused = ring.keyring.begin(ask)
    assert (refused.call_id, refused.limit) == (7, "2 requests per minute")
    assert 20 < refused.wait_s <= 30
    row = await ring.keyring.set("web", KeyPowers(tokens_per_minute=60))
    assert ring.keyring.begin(ask).wait_s == 0
    ring.keyring.charge(row.id, 100)
    assert ring.keyring.begin(ask).limit == "60 tokens per minute"
    left = ring.keyring.left(row)
    assert left.requests is None
    assert left.tokens is not None
    assert -40 <= left.tokens < 0  # one token a second since; a busy machine takes its time
    await ring.keyring.revoke("web")
    assert ring.keyring.begin(ask).wait_s == 0
    again = await Ring.make(database, history)
    assert again.keyring.left(row) == (None, None)


async def test_warning_when_nobody_can_get_in(ring: Ring) -> None:
    [warning] = await ring.events("no_api_key")
    assert "10.0.0.1 port 8000" in warning
    assert "gpupool key add" in warning
    await ring.keyring.add("web", KeyPowers())
    await ring.keyring.set("web", KeyPowers(priority="low"))
    assert len(await ring.events("no_api_key")) == 1
    await ring.keyring.revoke("web")
    assert len(await ring.events("no_api_key")) == 2


async def test_no_warning_where_no_key_is_needed(database: Database, history: History) -> None:
    ring = await Ring.make(database, history, "")
    assert await ring.events("no_api_key") == []


async def test_expired_keys_do_not_count(ring: Ring) -> None:
    powers = KeyPowers(priority="high", expires_at=ring.clock.now_s + 10)
    await ring.keyring.add("web", powers)
    ring.clock.now_s += 9
    assert (ring.keyring.num_valid, ring.keyring.has_high) == (1, True)
    ring.clock.now_s += 2
    assert (ring.keyring.num_valid, ring.keyring.has_high) == (0, False)
    ring.keyring.tick(ring.clock.now_s)
    assert len(await ring.events("no_api_key")) == 2


async def test_refused_strangers_are_one_event_a_minute(ring: Ring) -> None:
    ring.keyring.reported(m.AccessReport(2))
    ring.keyring.reported(m.AccessReport(3))
    ring.keyring.tick(ring.clock.now_s + 61)
    assert await ring.events("refused") == [
        "2 requests were refused: no valid API key",
        "3 requests were refused: no valid API key",
    ]
