"""The admin API's server: routes, the guard of the socket, log reading."""
