"""Which sweeps a user may prune: those of DAGs whose runs Airflow lets the user delete."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.identity import MAIN_DAG, possible_places
from hermes_ops.airflow.prune.candidates import DeletionRights, PruneRules
from hermes_ops.airflow.prune.removal import PruneEntry
from hermes_ops.cli.storage_commands import _find
from tests.unit.airflow.prune.test_removal import DAY_S, NOW_S, World, left_of

REFUSED = f"Airflow does not let this user delete runs of the DAG {MAIN_DAG}"


class Mine(World):
    """A world in which no model is registered."""

    def registered(self) -> dict[str, str]:
        return {}


def find(world: World) -> Any:
    connection: Any = SimpleNamespace(airflow=world, tracker=world)
    rules = PruneRules(NOW_S, 90 * DAY_S)
    return _find(connection, world.removal(), rules, keep_best=False)


@pytest.mark.parametrize(
    ("sweep", "dags"),
    [
        ("digits-1", (MAIN_DAG,)),
        ("team:digits-1", (MAIN_DAG, "team")),
        ("team:group:digits-1", (MAIN_DAG, "team")),
        (f"{MAIN_DAG}:group:digits-1", (MAIN_DAG,)),
        (":digits-1", (MAIN_DAG,)),
    ],
)
def test_an_id_may_mean_a_run_of_these_dags(sweep: str, dags: tuple[str, ...]) -> None:
    assert tuple(dict.fromkeys(place.dag_id for place in possible_places(sweep))) == dags


def test_who_may_delete_no_runs_prunes_nothing_and_leaves_nothing_to_the_next_pruning(
    tmp_path: Path,
) -> None:
    world = Mine(tmp_path, forbidden={MAIN_DAG})
    world.make("old")
    found = find(world)
    assert (found.entries, found.kept) == ([], {"old": REFUSED})
    assert world.removal().journal.entries() == []


def test_a_sweep_that_airflow_does_not_show_to_this_user_is_not_taken_for_a_lost_one(
    tmp_path: Path,
) -> None:
    world = Mine(tmp_path, hidden={"theirs"}, forbidden={MAIN_DAG})
    world.make("theirs")
    before = sorted(left_of(world, "theirs"))
    found = find(world)
    assert found.entries == []
    assert found.kept == {"theirs": REFUSED}
    assert sorted(left_of(world, "theirs")) == before


def test_the_folder_of_a_lost_sweep_of_a_team_goes_only_by_who_may_delete_in_both_dags(
    tmp_path: Path,
) -> None:
    world = Mine(tmp_path)
    (tmp_path / "sweeps" / "team:digits-1").mkdir(parents=True)
    rights: Any = DeletionRights(world)  # type: ignore[arg-type]
    assert rights.refusal("team:digits-1") == ""
    world.forbidden = {MAIN_DAG}
    rights = DeletionRights(world)  # type: ignore[arg-type]
    assert rights.refusal("team:digits-1") == REFUSED
    assert rights.refusal("team:digits-1", "team") == ""


def test_an_interrupted_pruning_is_not_completed_by_who_may_not_begin_it(tmp_path: Path) -> None:
    world = Mine(tmp_path, forbidden={MAIN_DAG})
    world.make("old")
    world.removal().journal.write(PruneEntry("old", MAIN_DAG, "old", "plan"))
    found = find(world)
    assert (found.entries, found.kept) == ([], {"old": REFUSED})


def test_airflow_is_asked_once_for_each_dag(tmp_path: Path) -> None:
    world = Mine(tmp_path)
    for sweep in ("one", "two", "three"):
        world.make(sweep)
    assert len(find(world).entries) == 3
    assert world.asked == [MAIN_DAG]
