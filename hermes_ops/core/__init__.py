"""The decision core: frozen facts in, plans out; no I/O, no clock, no randomness of its own."""
