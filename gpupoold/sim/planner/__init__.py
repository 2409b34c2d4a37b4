"""The planner: the answer to "do these models fit on these devices", and changes to make."""
