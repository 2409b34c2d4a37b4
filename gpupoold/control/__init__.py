"""The control plane: everything in ``gpupoold`` around the scheduling core.

Owns live requests, models, weights snapshots and the processes of workers and frontends. The rooms
below are layers; a contract in ``pyproject.toml`` states the permitted imports. Imports no server
(``admin``), engine (``worker``) or HTTP process (``frontend``).
"""
