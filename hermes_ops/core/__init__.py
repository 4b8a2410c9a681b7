"""The model of the pool: frozen facts in, plans out; no I/O, no clock, no randomness."""
