"""The admin API's server: routes, the guard of the socket, log reading.

Imports the control plane and ``metrics``; nothing but ``service`` imports this package.
"""
