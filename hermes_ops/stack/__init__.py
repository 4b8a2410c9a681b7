"""`hermes up`, `down` and `status`: Airflow, MLflow and the controller on one machine."""

from hermes_ops.stack.record import StackRecord, client_environment, load

__all__ = ["StackRecord", "client_environment", "load"]
