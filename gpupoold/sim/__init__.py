"""Virtual time, workloads and metrics for comparing policies without engines or devices."""
