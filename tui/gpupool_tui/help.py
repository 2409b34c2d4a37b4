"""The help screen, from the table of keys."""

from __future__ import annotations

from rich.text import Text

from gpupool_tui.keys import KEYS


def help_text(*, is_read_only: bool) -> Text:
    text = Text()
    for group, keys in KEYS:
        is_off = is_read_only and any(key.is_change for key in keys)
        text.append(group, "bold")
        text.append("  (not here: read-only)\n" if is_off else "\n")
        for key in keys:
            text.append(f"  {key.shown:<11}", "bold")
            text.append(f"{key.meaning}\n")
    text.rstrip()
    return text
