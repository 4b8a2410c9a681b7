"""Contract tests that a package with a policy or a sampler runs in its own suite.

    from hermes_ops.testing import PolicyContract, SamplerContract

    class TestShortest(PolicyContract):
        policies = ("shortest",)

They need pytest and hypothesis: `pip install hermes-ops[testing]`.
"""

from __future__ import annotations

import pytest

for _name in ("policy_contract", "sampler_contract"):  # before they are imported
    pytest.register_assert_rewrite(f"hermes_ops.testing.{_name}")

from hermes_ops.testing.policy_contract import PolicyContract  # noqa: E402 - rewritten on import
from hermes_ops.testing.sampler_contract import SamplerContract  # noqa: E402 - rewritten on import

__all__ = ["PolicyContract", "SamplerContract"]
