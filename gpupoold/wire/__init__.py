"""Messages between the daemon, its workers and its frontends, and the channel for them.

Defines each message once. Imports ``domain`` and stored latency profiles.
"""
