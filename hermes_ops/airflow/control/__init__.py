"""The controller of a pool: observes Airflow and MLflow, decides, and applies."""
