"""Benchmarks of Hermes Ops: `python -m bench [NAME ...]`; docs/benchmarks.md says what each is."""
