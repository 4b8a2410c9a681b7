"""The script's MLflow calls: land them in the trial's run, read its curve from them."""
