"""vLLM's engines in this process; no other room imports vLLM's engine."""
