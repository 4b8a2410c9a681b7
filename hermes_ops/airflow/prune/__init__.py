"""`hermes prune`: find and remove what is left of sweeps that ended long ago."""
