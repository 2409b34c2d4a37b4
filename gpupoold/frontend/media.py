"""Fetching of media by URL, from listed hosts only."""

from __future__ import annotations

from urllib3.util import Url
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector


@MEDIA_CONNECTOR_REGISTRY.register("gpupool")
class AllowListConnector(MediaConnector):  # type: ignore[misc, unused-ignore]
    """vLLM's connector, except that an empty host list permits no host instead of all."""

    def _assert_url_in_allowed_media_domains(self, url_spec: Url) -> None:
        if url_spec.hostname not in self.allowed_media_domains:
            raise VLLMValidationError(
                f"Media are not fetched from {str(url_spec.hostname)[:200]!r}. Send them in the "
                "request as a data: URL, or ask for the host to be listed in "
                "security.media_hosts."
            )
