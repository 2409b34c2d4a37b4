"""A vLLM general plugin: vLLM alone with gpupool's linear kernels, for fair comparison.

vLLM loads the plugin in each of its processes; without ``GPUPOOL_PLAIN_LINEAR=1`` the plugin has no
effect.
"""

from __future__ import annotations

import os


def register() -> None:
    """Switch oneDNN off; vLLM calls every plugin of ``vllm.general_plugins`` once per process."""
    if os.environ.get("GPUPOOL_PLAIN_LINEAR") == "1":
        import vllm._custom_ops as custom_ops

        custom_ops._supports_onednn = False
