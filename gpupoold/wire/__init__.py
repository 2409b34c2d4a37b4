"""Messages between the daemon, its workers and its frontends, and the channel for messages.

Defines each message once. Imports ``domain`` and stored latency profiles.
"""
