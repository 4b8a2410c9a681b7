"""Registers Hermes Ops' links with Airflow."""

from hermes_ops.airflow import HermesPlugin

__all__ = ["HermesPlugin"]
