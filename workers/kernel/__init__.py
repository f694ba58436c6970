"""The sweep over tiles as a kernel of the GPU, and the check that it agrees with the tiles."""
