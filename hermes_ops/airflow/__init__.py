"""Airflow: the only package that imports airflow (operators, controller, metadata, DAG factory)."""
