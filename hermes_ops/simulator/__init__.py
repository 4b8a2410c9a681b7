"""Simulation in virtual time, with the same loop and the same policies that run live."""
