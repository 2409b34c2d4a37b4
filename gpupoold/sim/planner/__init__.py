"""The planner: whether given models fit given devices, and the first change to make."""
