"""Keys of the configuration file that were renamed; an old name stays valid for one release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEW_NAMES = {
    ("memory", "image_files"): "snapshot_files",
    ("memory", "canary_interval"): "self_check_interval",
}


def with_new_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of parsed TOML with new names in place of old names.

    If a section has both names, the old name stays, and is reported as an unknown key.
    """
    data = dict(raw)
    for section, old, new in _old_names(raw):
        if new not in raw[section]:
            table = dict(data[section])
            table[new] = table.pop(old)
            data[section] = table
    return data


def renamed_keys(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each old name in parsed TOML."""
    return tuple(
        f"{section}.{old} is now called {section}.{new}; the next release refuses the old name"
        for section, old, new in _old_names(raw)
    )


def _old_names(raw: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (section, old, new)
        for (section, old), new in _NEW_NAMES.items()
        if isinstance(table := raw.get(section), dict) and old in table
    ]
