"""The `gpupool` command line; talks to the daemon through `gpupoold.api.client` only."""
