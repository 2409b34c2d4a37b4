"""Keys one by one: spelled so that they are read as the same, and compared with another file."""

from __future__ import annotations

import tomllib

import pytest

from gpupoold.config.keys import changes_between, settings_of, with_changes
from gpupoold.config.schema import Settings, known_keys, parse_settings
from gpupoold.config.values import Effect


def parse(text: str) -> Settings:
    return parse_settings(tomllib.loads(text), "gpupool.toml")


class TestKeys:
    def test_all_keys_are_there(self) -> None:
        keys = {one.key.replace("device[0]", "device") for one in settings_of(parse(""))}
        known = known_keys()
        assert keys == {f"{section}.{key}" for section in known for key in known[section]}

    def test_values_are_spelled_as_the_file_spells_them(self) -> None:
        text = "[limits]\nstop_grace = 0.25\n[memory]\nkv_host = 3221225472\n[server]\nport = 80"
        spelled = {one.key: one.spelled for one in settings_of(parse(text))}
        assert spelled["limits.stop_grace"] == "250ms"
        assert spelled["limits.load_timeout"] == "10m"
        assert spelled["memory.kv_host"] == "3GiB"
        assert spelled["server.port"] == 80
        assert spelled["memory.reserve"] is None


class TestChanges:
    @pytest.mark.parametrize(
        ("text", "key", "effect"),
        [
            ('[log]\nlevel = "debug"', "log.level", "live"),
            ('[limits]\nstop_grace = "3s"', "limits.stop_grace", "live"),
            ("[history]\nmax_events = 7", "history.max_events", "live"),
            ('[memory]\nmodel_cache = "1GiB"', "memory.model_cache", "live"),
            ('[memory]\nkv_host = "1GiB"', "memory.kv_host", "restart"),
            ('[scheduling]\nquota_max = "1s"', "scheduling.quota_max", "live"),
            ('[scheduling]\npolicy = "static"', "scheduling.policy", "restart"),
            ("[security]\nallow_pickle = true", "security.allow_pickle", "loads"),
            ("[server]\nport = 9", "server.port", "restart"),
            ("[server]\nmax_body = 9", "server.max_body", "live"),
            ('[[device]]\nkind = "emulated"\nmemory = 4096', "device[0].memory", "restart"),
        ],
    )
    def test_one_key(self, text: str, key: str, effect: str) -> None:
        now, wanted = parse(""), parse(text)
        [change] = changes_between(now, wanted)
        assert (change.key, change.effect) == (key, effect)
        after = with_changes(now, wanted, [change])
        assert after == (now if effect == "restart" else wanted)

    def test_nothing(self) -> None:
        assert changes_between(parse(""), parse('[limits]\nload_timeout = "600s"')) == []

    def test_roles_wait_for_devices_that_have_changed(self) -> None:
        now = parse('devices = ["sim:A10"]')
        wanted = parse('devices = ["sim:A10", "sim:A10"]\n[scheduling]\nroles = ["auto", "mixed"]')
        changes = changes_between(now, wanted)
        assert {one.effect for one in changes} == {Effect.RESTART}
        assert "scheduling.roles" in {one.key for one in changes}
        assert with_changes(now, wanted, changes) == now
        new = next(one for one in changes if one.key == "device[1].gpu")
        assert new.before is None
        assert new.after == "A10"
