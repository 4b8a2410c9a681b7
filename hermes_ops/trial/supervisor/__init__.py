"""hermes-trial itself: start one segment of a trial, watch its script, record how it ended."""
