"""A trial's task: the operators, the segment that they run, and its metrics."""
