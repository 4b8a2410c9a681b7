"""The contract tests of Hermes Ops over this package's policy and sampler."""

from hermes_ops.testing import PolicyContract, SamplerContract


class TestMostProgress(PolicyContract):
    policies = ("most-progress",)


class TestHalton(SamplerContract):
    samplers = ("halton",)
