"""Measurements inside a worker: what moving memory costs, without the time of messages."""
