"""Registers Hermes Ops' links with Airflow."""

from hermes_ops.airflow.plugin import HermesPlugin

__all__ = ["HermesPlugin"]
