"""Copies of a trial's checkpoints in an object store: upload, download, layout."""
