"""Facts about the machine, and checks of these facts for ``gpupool doctor``.

Probes collect facts; checks are pure functions of the facts.
"""
