"""Measurements inside an instance: what moving memory costs, without the time of messages."""
