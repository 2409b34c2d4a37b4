"""The `gpupool` command line; talks to the daemon through `gpupoold.admin.client` only."""
