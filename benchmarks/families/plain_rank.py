"""The ranks of vLLM alone: processes that vLLM starts, with gpupool's CPU kernels.

vLLM imports the module of a worker's extension before anything of the model.
"""

from __future__ import annotations

from gpupoold.worker.engine.cpu_build import adapt_cpu_build

adapt_cpu_build()


class PlainRank:
    """An extension of vLLM's worker without methods."""
