"""The worker processes, one per device; owns no request."""
