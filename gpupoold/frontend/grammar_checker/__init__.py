"""The process that compiles new grammars in children that may die.

Owns their limits of CPU time and memory. Imports the frontend's adapter of vLLM.
"""
