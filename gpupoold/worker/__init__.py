"""The worker process: one device, its memory, vLLM's engines and their turns.

Started by name (``python -m gpupoold.worker``), never imported by other packages. The rooms are
layers, see ``pyproject.toml``.
"""
