"""The states of models and of their hosts, and the answer to "can this model serve, and where?".

Pure bookkeeping. Imports ``processes`` and ``weights``; no request, worker or frontend.
"""
