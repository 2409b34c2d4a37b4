"""The section ``[traces]``."""

from __future__ import annotations

from pydantic import Field, field_validator

from gpupoold.config.values import Section


class TracesSettings(Section):
    """``[traces]``: OpenTelemetry spans of requests, sent by OTLP over HTTP."""

    endpoint: str = ""
    """URL of an OpenTelemetry collector for traces of requests, such as
    `"http://127.0.0.1:4318/v1/traces"`; empty: no traces.
    """
    share: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """Share of the requests without a `traceparent` of their own that are recorded."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if endpoint and not endpoint.startswith(("http://", "https://")):
            text = f'{endpoint!r}: write a URL such as "http://127.0.0.1:4318/v1/traces"'
            raise ValueError(text)
        return endpoint
