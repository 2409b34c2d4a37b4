"""The worker process of a simulated device: answers over the wire, without an engine.

Started by name (``python -m gpupoold.simdevice``), never imported by other packages.
"""
