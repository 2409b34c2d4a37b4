"""The process that compiles new grammars in children that may die.

Owns the children's limits of CPU time and memory. Imports the frontend's adapter of vLLM.
"""
