"""A scheduling policy and a sampler for Hermes Ops, in a package of their own."""
