"""Settings with worked-out budgets, and what a changed file does to a running daemon."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from gpupoold.config.fitting import Update, fitted, update_of
from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.config.schema import Settings, parse_settings
from gpupoold.errors import SettingError

GIB = 2**30
A10 = MachineDevice("cuda", 24 * 10**9)
MACHINE = Machine(256 * 10**9, (A10,) * 2)
DEVICES = 'devices = ["cuda:0", "cuda:1"]\n'


def parse(text: str) -> Settings:
    return parse_settings(tomllib.loads(DEVICES + text), "gpupool.toml")


def running(text: str = "") -> Settings:
    return fitted(parse(text), MACHINE).settings


def update(now: Settings, text: str, machine: Machine = MACHINE) -> Update:
    return update_of(now, parse(text), machine, machine)


def changed(found: Update) -> dict[str, str]:
    return {one.key: one.effect for one in found.changes}


def test_all_budgets_have_values() -> None:
    found = fitted(parse(""), MACHINE)
    memory = found.settings.memory
    assert memory.model_cache_bytes == found.budgets.model_cache_bytes > 100 * GIB
    assert memory.kv_host_bytes == found.budgets.kv_host_bytes == 11 * GIB
    assert memory.reserve_for("cuda") == found.budgets.reserve_bytes
    assert found.settings.limits.max_bytes_in_flight == 10**9
    assert fitted(found.settings, MACHINE).settings == found.settings


def test_the_same_file_changes_nothing() -> None:
    for num_gb in range(40, 600, 7):  # the sizes are rounded differently
        machine = replace(MACHINE, memory_bytes=num_gb * 10**9)
        now = fitted(parse(""), machine).settings
        assert update(now, "", machine).changes == []
        assert changed(update(now, '[scheduling]\npolicy = "static"', machine)) == {
            "scheduling.policy": "restart"
        }
    found = update(running(), "")
    assert found.changes == []
    assert found.fitted.settings == running()
    assert found.reasons.keys() == {
        "memory.model_cache",
        "memory.kv_host",
        "memory.reserve",
        "limits.max_bytes_in_flight",
    }


def test_a_set_model_cache_applies_at_once_and_back() -> None:
    found = update(running(), '[memory]\nmodel_cache = "50GiB"')
    assert changed(found) == {"memory.model_cache": "live"}
    assert found.fitted.settings.memory.model_cache_bytes == 50 * GIB
    assert "memory.model_cache" not in found.reasons
    back = update(found.fitted.settings, "")
    assert changed(back) == {"memory.model_cache": "live"}
    assert back.fitted.settings == running()


def test_kv_waits_and_the_model_cache_is_worked_out_beside_the_one_in_force() -> None:
    now = running()
    found = update(now, '[memory]\nkv_host = "40GiB"')
    assert changed(found) == {"memory.kv_host": "restart"}
    assert found.fitted.settings == now
    restarted = running('[memory]\nkv_host = "40GiB"')
    assert restarted.memory.model_cache_bytes < now.memory.model_cache_bytes - 50 * GIB


def test_what_fits_only_after_a_restart_is_refused() -> None:
    now = running('[memory]\nkv_host = "80GiB"')
    text = '[memory]\nkv_host = "1GiB"\nmodel_cache = "200GiB"'
    running(text)
    with pytest.raises(SettingError, match=r"memory.kv_host 2 x 80 GiB") as caught:
        update(now, text)
    assert caught.value.key == "memory.model_cache"
    assert "restart" in caught.value.hint


def test_a_changed_limit_is_taken_up() -> None:
    lower = replace(MACHINE, limit_bytes=200 * 10**9)
    found = update(running(), "", lower)
    assert changed(found)["memory.model_cache"] == "live"
    now = running()
    assert found.fitted.settings.memory.model_cache_bytes < now.memory.model_cache_bytes
    assert found.fitted.settings.memory.kv_host_bytes == now.memory.kv_host_bytes


def test_new_devices_wait_and_do_not_count_yet() -> None:
    text = 'devices = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]'
    file = parse_settings(tomllib.loads(text), "gpupool.toml")
    four = replace(MACHINE, devices=(A10,) * 4)
    found = update_of(running(), file, MACHINE, four)
    assert {one.effect for one in found.changes} == {"restart"}
    assert found.fitted.settings == running()
