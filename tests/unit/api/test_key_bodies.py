"""The bodies about API keys bound the limits."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpupoold.api.schemas_access import AddKeyRequest

LIMITS = ("requests_per_minute", "tokens_per_minute", "max_live", "expires_at")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("limit", [0, -1, "inf", "nan"])
def test_a_limit_of_a_new_key_is_positive_and_finite(name: str, limit: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        AddKeyRequest.model_validate({"name": "web", name: limit})
    assert AddKeyRequest.model_validate({"name": "web", name: 1, "models": ["a"]}).models == ("a",)


@pytest.mark.parametrize("wrong", [{"priority": "background"}, {"pace": "x"}, {"model": "a"}])
def test_a_new_key_has_no_wrong_values(wrong: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        AddKeyRequest.model_validate({"name": "web"} | wrong)
