"""Checks of a model by vLLM's own classes before a load, in a process of its own."""
