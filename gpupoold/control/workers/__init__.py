"""The worker processes, one per device: start, orders, messages, roles.

Imports ``fleet``, ``processes`` and ``weights``; owns no request.
"""
