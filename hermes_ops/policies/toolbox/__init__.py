"""Parts that several policies share; all pure, and none imports a policy.

* `fill`: serve jobs in an order; `answer`: make a plan with reasons of the grants;
* `sweep_queues`: one queue for each sweep; `multilevel_queues`: queues by attained service;
* `rounds`: round robin; `rungs`: successive halving;
* `convergence`, `curve_fit`: what a learning curve says of the rest of a training;
* `ended_jobs`: jobs that ended since the last decision; `parameter_checks`: options of a policy.
"""
