"""API keys and their use, and the secret shared with the fleet.

The frontends are informed of each change. Imports ``accounting`` (refusals are recorded as events);
no request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gpupool_state import ApiKeys, Database, History, KeyRow, KeyUse, Registry
from gpupoold.access.fleet import is_secret
from gpupoold.access.rates import Bucket, RateUse
from gpupoold.access.secret import make_key
from gpupoold.api_keys import KeyPowers
from gpupoold.config.sections import AccessSettings
from gpupoold.control.accounting.meters import RefusalEvents
from gpupoold.errors import Failed, NoSuchModel
from gpupoold.event_kinds import KeyEvent
from gpupoold.files import write_private
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

_SAVE_EVERY_S = 10.0
_LOCKED_OUT = (
    "{reason}, but no key is valid: all requests are answered with 401. "
    "Create a key with `gpupool key add NAME`"
)

SECRET_FILE = "fleet-secret"


class Keyring:
    """All keys that are not revoked; one object per daemon, on its event loop.

    The use of keys is written to disk every few seconds; a killed daemon loses the last seconds. A
    change of a key is on disk before the frontends learn of the change.
    """

    def __init__(
        self,
        database: Database,
        history: History,
        send: Callable[[m.Message], None],
        access: AccessSettings,
        required_because: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``send`` sends a message to all frontends. ``required_because`` is the reason why every
        request needs a key, empty if keys are optional. ``clock`` and ``wall_clock`` return
        seconds.
        """
        self._store = ApiKeys(database)
        self._registry = Registry(database)
        self._history = history
        self._send = send
        self._required_because = required_because
        self._access = access
        self._clock = clock
        self._wall_clock = wall_clock
        self._refusals = RefusalEvents(history)
        self._rows: dict[str, KeyRow] = {}
        self._unsaved: dict[str, KeyUse] = {}
        self._rates = KeyRates()
        self._was_locked_out = False

    @property
    def are_required(self) -> bool:
        """True if every request needs a key."""
        return bool(self._required_because)

    @property
    def names(self) -> dict[str, str]:
        """The names of all keys that are not revoked, by id."""
        return {row.id: row.name for row in self._rows.values()}

    @property
    def rate_uses(self) -> dict[str, RateUse]:
        """The use of keys with rates since the start, by id, without the use on other nodes."""
        return self._rates.used

    @property
    def num_valid(self) -> int:
        """Number of keys that are valid now."""
        return sum(1 for _ in self._valid())

    @property
    def has_high(self) -> bool:
        """True if a valid key has high priority."""
        return any(row.powers.priority == "high" for row in self._valid())

    def max_live(self, key_id: str) -> int | None:
        """Return the limit of a key's live requests, None for no limit."""
        row = self._rows.get(key_id)
        return None if row is None else row.powers.max_live

    def left(self, row: KeyRow) -> KeyLeft:
        """Return the remaining rates of a key."""
        return self._rates.left(row.id, self._clock())

    async def load(self) -> None:
        """Read the keys of the database; warn if all requests will be refused."""
        for row in await self._store.list():
            self._keep(row)
        self._warn_if_locked_out()

    async def run(self) -> None:
        """Write the use of keys periodically; never returns."""
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write the use since the last call; after an error the use is written later."""
        uses, self._unsaved = self._unsaved, {}
        if not uses:
            return
        try:
            await self._store.note_use(uses.values())
        except Failed as error:
            _logger.warning("the use of API keys cannot be written now: %s", error)
            for use in uses.values():
                self._add_use(use)

    async def list(self, *, with_revoked: bool = False) -> list[KeyRow]:
        """Return the keys by name, with their present use."""
        await self.save()
        return await self._store.list(with_revoked=with_revoked)

    async def add(self, name: str, powers: KeyPowers) -> tuple[KeyRow, str]:
        """Create a key; return the row and the text, which is not stored.

        Raises:
            UsageError, Refused: the name is invalid or taken.
            NoSuchModel: the key names an unknown model.
        """
        key = make_key()
        row = await self._store.add(key.id, name, key.digest, await self._resolved(powers))
        self._note_change(row, "key_added")
        return row, key.text

    async def adopt(self, key_id: str, name: str, digest: str, powers: KeyPowers) -> KeyRow:
        """Add a key of the fleet, whose models need not be known here.

        Raises UsageError, Refused: the name is invalid or taken.
        """
        row = await self._store.add(key_id, name, digest, powers)
        self._note_change(row, "key_added")
        return row

    async def set(self, name: str, powers: KeyPowers) -> KeyRow:
        """Change a key's powers, from the next request on."""
        row = await self._store.set(name, await self._resolved(powers))
        self._note_change(row, "key_changed")
        return row

    async def find(self, name: str) -> KeyRow:
        """Return the key of this name, with its present use."""
        await self.save()
        return await self._store.find(name)

    async def rotate(self, name: str, grace_s: float) -> tuple[KeyRow, str]:
        """Give a key a new secret; the old secret stays valid for ``grace_s`` seconds."""
        key = make_key((await self._store.find(name)).id)
        until = self._wall_clock() + grace_s if grace_s > 0 else None
        row = await self._store.rotate(name, key.digest, until)
        self._note_change(row, "key_rotated")
        return row, key.text

    async def revoke(self, name: str) -> KeyRow:
        """Revoke a key: new requests are refused, and running requests continue."""
        await self.save()
        row = await self._store.revoke(name)
        self._note_change(row, "key_revoked")
        return row

    def publish(self) -> None:
        """Send the rules of access to the frontends."""
        keys = [_record(row) for row in self._rows.values()]
        rules = m.AccessRules(
            keys,
            self.are_required,
            self._access.host_names,
            self._access.share_prefixes,
            self._access.allowed_origins,
        )
        self._send(rules)

    def begin(self, message: m.AskRate) -> m.RateAnswer:
        """Count an HTTP request of a key, unless the key's rates refuse the request."""
        limit, wait_s = self._rates.begin(message.key_id, self._clock())
        return m.RateAnswer(message.call_id, limit, wait_s)

    def charge(self, key_id: str, num_tokens: int) -> None:
        """Count tokens of a prompt or an answer for the rate of a key."""
        self._rates.charge(key_id, num_tokens, self._clock())

    def charge_elsewhere(self, uses: Mapping[str, RateUse]) -> None:
        """Charge use on other nodes of the fleet to the rates of keys; ignore unknown keys."""
        now_s = self._clock()
        for key_id, use in uses.items():
            self._rates.take(key_id, use, now_s)

    def reported(self, message: m.AccessReport) -> None:
        """Add a frontend's count of requests without a valid key."""
        if message.num_unauthorised:
            self._refusals.note("api", "no valid API key", self._clock(), message.num_unauthorised)

    def tick(self, now_s: float) -> None:
        """Record due events; to be called every second."""
        self._refusals.report(now_s)
        self._warn_if_locked_out()  # the last key may have expired

    def used(self, key_id: str, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Add new requests, or the tokens of a finished request, to a key's use."""
        if key_id:
            self._add_use(KeyUse(key_id, num_requests, num_tokens, self._wall_clock()))

    def _add_use(self, use: KeyUse) -> None:
        known = self._unsaved.get(use.key_id)
        if known is not None:
            use = KeyUse(
                use.key_id,
                known.num_requests + use.num_requests,
                known.num_tokens + use.num_tokens,
                max(known.last_used_at, use.last_used_at),
            )
        self._unsaved[use.key_id] = use

    async def _resolved(self, powers: KeyPowers) -> KeyPowers:
        """Return ``powers`` with model names in place of aliases; presets and adapters
        keep their names."""
        if powers.models is None:
            return powers
        names = []
        for name in powers.models:
            model = await self._registry.get(name)
            if model is None:
                raise NoSuchModel(f"no model is named {name!r}", "see `gpupool list`")
            names.append(name if model.spec.further_named(name) else model.spec.name)
        return dataclasses.replace(powers, models=tuple(dict.fromkeys(names)))

    def _note_change(self, row: KeyRow, kind: KeyEvent) -> None:
        if row.revoked_at is None:
            self._keep(row)
        else:
            self._rows.pop(row.id, None)
            self._rates.forget(row.id)
        self._history.record_event("info", kind, row.name, f"the API key {row.id}")
        self.publish()
        self._warn_if_locked_out()

    def _keep(self, row: KeyRow) -> None:
        powers, now_s = row.powers, self._clock()
        self._rows[row.id] = row
        self._rates.set(row.id, powers.requests_per_minute, powers.tokens_per_minute, now_s)

    def _warn_if_locked_out(self) -> None:
        """Record an event once when all requests are refused because no key is valid."""
        is_locked_out = self.are_required and not self.num_valid
        if is_locked_out and not self._was_locked_out:
            self._history.record_event(
                "warning", "no_api_key", "api", _LOCKED_OUT.format(reason=self._required_because)
            )
            _logger.warning(_LOCKED_OUT.format(reason=self._required_because))
        self._was_locked_out = is_locked_out

    def _valid(self) -> Iterator[KeyRow]:
        now = self._wall_clock()
        for row in self._rows.values():
            expires_at = row.powers.expires_at
            if expires_at is None or now < expires_at:
                yield row


def _record(row: KeyRow) -> m.KeyRecord:
    digest, until = row.previous_digest or "", row.previous_until or 0.0
    return m.KeyRecord(row.id, row.name, row.digest, digest, until, **vars(row.powers))


class KeyLeft(NamedTuple):
    """Remaining rates of a key; a negative value is a debt, None means no limit."""

    requests: float | None
    tokens: float | None


class KeyRates:
    """The buckets of all keys with limits, by the keys' ids.

    The daemon owns the buckets, so that a limit holds over all frontends together and survives a
    frontend's restart. Pure: the caller gives instants of one monotonic clock.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._used: dict[str, RateUse] = {}

    @property
    def used(self) -> dict[str, RateUse]:
        """The use of keys with limits in this process, without what :meth:`take` took."""
        return dict(self._used)

    def set(
        self,
        key_id: str,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        now_s: float,
    ) -> None:
        """Change a key's limits, None for no limit; past use stays counted."""
        _set(self._requests, key_id, requests_per_minute, now_s)
        _set(self._tokens, key_id, tokens_per_minute, now_s)
        if requests_per_minute is None and tokens_per_minute is None:
            self._used.pop(key_id, None)
        else:
            self._used.setdefault(key_id, RateUse())

    def forget(self, key_id: str) -> None:
        """Remove the buckets of a revoked key."""
        for record in (self._requests, self._tokens, self._used):
            record.pop(key_id, None)

    def begin(self, key_id: str, now_s: float) -> tuple[str, float]:
        """Count an HTTP request of a key, and return ``("", 0.0)``, if the rates permit the
        request.

        Otherwise returns the limit and the seconds until a request may begin.
        """
        longest_s, limit = 0.0, ""
        requests, tokens = self._requests.get(key_id), self._tokens.get(key_id)
        for bucket, what in ((requests, "requests"), (tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(1, now_s)
            if bucket is not None and wait_s > longest_s:
                longest_s, limit = wait_s, f"{bucket.per_minute} {what} per minute"
        if not longest_s:
            self._count(key_id, RateUse(1, 0))
            if requests is not None:
                requests.take(1, now_s)
        return limit, longest_s

    def charge(self, key_id: str, num_tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or an answer."""
        self._count(key_id, RateUse(0, num_tokens))
        self.take(key_id, RateUse(0, num_tokens), now_s)

    def take(self, key_id: str, use: RateUse, now_s: float) -> None:
        """Take use of a key from the buckets, without counting the use as this process's."""
        for buckets, num in ((self._requests, use.num_requests), (self._tokens, use.num_tokens)):
            if key_id in buckets:
                buckets[key_id].take(num, now_s)

    def left(self, key_id: str, now_s: float) -> KeyLeft:
        """Return the remaining rates of a key."""
        requests, tokens = self._requests.get(key_id), self._tokens.get(key_id)
        return KeyLeft(
            None if requests is None else requests.level(now_s),
            None if tokens is None else tokens.level(now_s),
        )

    def _count(self, key_id: str, use: RateUse) -> None:
        known = self._used.get(key_id)
        if known is not None:
            self._used[key_id] = known + use


def _set(buckets: dict[str, Bucket], key_id: str, per_minute: int | None, now_s: float) -> None:
    old = buckets.pop(key_id, None)
    if per_minute is not None:
        buckets[key_id] = Bucket(per_minute, now_s, None if old is None else old.level(now_s))


class FleetMembership:
    """The secret of the daemon's fleet, in a file of the state folder.

    The frontends are informed of each change.
    """

    def __init__(
        self, folder: Path, downloads: Path, history: History, send: Callable[[m.Message], None]
    ) -> None:
        """``downloads`` has checkpoints for other nodes; ``send`` reaches all frontends."""
        self._folder = folder
        self._downloads = downloads
        self._history = history
        self._send = send
        self.secret = read_secret(folder)

    async def set(self, secret: str) -> None:
        """Take a secret over, or leave the fleet if it is empty.

        Raises Failed: the secret cannot be stored; nothing has changed.
        """
        await asyncio.to_thread(write_secret, self._folder, secret)
        is_new, self.secret = secret != self.secret, secret
        if is_new:
            text = "takes requests of a fleet's entrance" if secret else "is in no fleet any more"
            self._history.record_event("info", "fleet_changed", "gpupoold", text)
        self.publish()

    def publish(self) -> None:
        """Send the secret to the frontends."""
        self._send(m.FleetSecret(self.secret, str(self._downloads)))


def read_secret(folder: Path) -> str:
    """Return the secret of a daemon's fleet, empty without one.

    Raises Failed: the file cannot be read, or has no secret.
    """
    path = folder / SECRET_FILE
    try:
        text = path.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Failed(f"{path} cannot be read: {error}") from error
    if not is_secret(text):
        raise Failed(f"{path} is not the secret of a fleet", "remove the file, and join again")
    return text


def write_secret(folder: Path, secret: str) -> None:
    """Store the secret, readable by the daemon's user alone; an empty secret removes the file."""
    path = folder / SECRET_FILE
    try:
        if secret:
            write_private(path, f"{secret}\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error}") from error
