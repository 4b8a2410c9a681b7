"""A trial whose workers are on several nodes: each runs hermes-trial, and the first one leads."""
