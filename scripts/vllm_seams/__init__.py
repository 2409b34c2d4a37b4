"""The names of vLLM that gpupool uses, and their comparison between releases.

``found`` reads the names from gpupool's source, ``table`` adds what the source does not show,
``release`` finds each name in the Python sources of a release, and ``records`` keeps the results.
Nothing here imports vLLM.
"""
