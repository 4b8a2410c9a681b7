"""Standby interpreters: a server that holds them, its client in hermes-trial, the interpreter."""
