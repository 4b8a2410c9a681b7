"""The contract of policies within a quota, for those that size jobs or compare trials."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.quota import UserBudget
from hermes_ops.core.within_quota import WithinQuota
from hermes_ops.policies import compares_trials
from hermes_ops.testing.policy_contract import assert_sound
from hermes_ops.testing.worlds import QUOTA, built

pytestmark = pytest.mark.law

NAMES = ("pollux", "ones", "saxena", "elastic-frontrunner", "asha", "hyperband")
LIMITED = replace(QUOTA, user_budgets=(UserBudget("ann", sweeps=1), UserBudget("bob", None, 0.0)))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_plan_within_quotas_is_possible_explained_and_independent_of_the_order_of_jobs(
    name: str, data: st.DataObject
) -> None:
    quota = data.draw(st.sampled_from([QUOTA, LIMITED]))
    within = WithinQuota(built(name, "guarded"), quota, compares=compares_trials(name))
    assert_sound(name, within, data)
