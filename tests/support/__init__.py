"""Support of tests and benchmarks: makers of checkpoints that users do not need, durations."""
