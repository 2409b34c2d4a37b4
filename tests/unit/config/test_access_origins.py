"""The origins of ``access.allowed_origins``."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpupoold.config.sections import AccessSettings


def _settings(**values: object) -> AccessSettings:
    return AccessSettings.model_validate(values)


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example",
        "http://localhost:3000",
        "https://[::1]:8443",
        "app://obsidian.md",
        "chrome-extension://abcdef",
        "HTTPS://App.Example",
    ],
)
def test_origins_as_browsers_send_them(origin: str) -> None:
    assert _settings(allowed_origins=[origin]).allowed_origins == (origin.lower(),)


@pytest.mark.parametrize(
    "origin",
    [
        "app.example",
        "https://app.example/",
        "https://app.example/path",
        "https://",
        "https://*.example",
        "https://user@app.example",
        "null",
        "",
        7,
    ],
)
def test_what_no_browser_sends_is_refused(origin: object) -> None:
    with pytest.raises(ValidationError, match="is not an origin such as"):
        _settings(allowed_origins=[origin])


def test_any_origin_needs_keys() -> None:
    with pytest.raises(ValidationError, match='needs require_keys = "always"'):
        _settings(allowed_origins=["*"])
    settings = _settings(allowed_origins=["*"], require_keys="always")
    assert settings.allowed_origins == ("*",)
    with pytest.raises(ValidationError, match="leave the others out"):
        _settings(allowed_origins=["*", "https://a"], require_keys="always")
    with pytest.raises(ValidationError, match="at most 100"):
        _settings(allowed_origins=[f"https://a{i}" for i in range(101)])
