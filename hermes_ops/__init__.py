"""Hermes Ops: hyper-parameter sweeps on a shared GPU budget, run by Airflow."""

__version__ = "0.1.0"
