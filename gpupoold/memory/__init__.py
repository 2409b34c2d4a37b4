"""Device memory below the engines; imports no torch and no vLLM: addresses are integers."""
