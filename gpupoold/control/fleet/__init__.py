"""Bookkeeping of models and hosts; imports ``processes`` and ``weights``, no request or worker."""
