"""The DAG of a sweep: its plan, its report, and what is around them."""
