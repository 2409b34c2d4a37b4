"""The planner: whether given models fit given devices, and what to change first."""
