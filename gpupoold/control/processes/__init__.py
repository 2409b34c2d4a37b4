"""Supervision of child processes; owns no request and no model."""
