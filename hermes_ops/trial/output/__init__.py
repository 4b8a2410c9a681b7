"""The script's output: cut into lines, searched for metrics, passed on to the log."""
