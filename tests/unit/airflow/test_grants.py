from __future__ import annotations

from hermes_ops.airflow import grants


def test_the_role_may_read_seven_tables_and_update_two_columns() -> None:
    said = grants.statements("hermes")
    assert [s for s in said if s.startswith("GRANT")] == [
        'GRANT USAGE ON SCHEMA public TO "hermes"',
        "GRANT SELECT ON dag, dag_bundle_team, dag_run, slot_pool, task_instance, "
        'task_instance_note, task_state_store TO "hermes"',
        'GRANT UPDATE (priority_weight, pool_slots, queue) ON task_instance TO "hermes"',
    ]


def test_what_it_had_before_is_taken_away_first() -> None:
    assert grants.statements("x")[0] == 'REVOKE ALL ON ALL TABLES IN SCHEMA public FROM "x"'


def test_a_name_cannot_leave_its_quotes() -> None:
    assert 'FROM "a""; DROP TABLE dag; --"' in grants.statements('a"; DROP TABLE dag; --')[0]


def test_waiting_ends_as_soon_as_the_rights_are_there_or_time_is_up() -> None:
    now = [0.0]

    def pause() -> None:
        now[0] += 2.0

    assert grants.wait(lambda: now[0] >= 6.0, lambda: now[0], pause)
    assert now[0] == 6.0
    assert not grants.wait(lambda: False, lambda: now[0], pause)
    assert now[0] == 6.0 + grants.WAIT_S
