"""vLLM's engines in this process: the only room that imports vLLM's engine."""
