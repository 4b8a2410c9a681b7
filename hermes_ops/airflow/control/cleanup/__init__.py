"""Clean-up after budgets, people and lost runs: what is ended, repaired, kept or removed."""
