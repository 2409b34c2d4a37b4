"""Options of vLLM's engine and API for single models, checked and parsed."""
