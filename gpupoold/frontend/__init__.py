"""The frontend process: vLLM's OpenAI API behind a router with bounds.

Started by name (``python -m gpupoold.frontend``), never imported by other packages.
"""
