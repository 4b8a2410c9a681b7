from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import comparison, comparison_case, comparison_teams
from bench.comparison_case import ROOT, ComparisonCase, FiguresMissing, Reuse, version
from bench.comparison_sections import _off, _quoted, pooled, three_jobs
from bench.comparison_sizes import ElasticCase
from bench.comparison_teams import PHILLY, teams
from hermes_ops.core.model import Gpu
from hermes_ops.simulator.comparison import Comparison, Contender, compare
from hermes_ops.simulator.workload_source import WorkloadSource


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HERMES_DATA", raising=False)
    monkeypatch.setattr(comparison_case, "KEPT", tmp_path)
    monkeypatch.setattr(comparison_case, "JOBS", 1)
    return tmp_path


THREE = ComparisonCase("traces/three_jobs.csv", "2", ("fifo", "srsf"))


def test_the_command_of_a_table_has_all_that_decides_its_figures() -> None:
    curves = ComparisonCase(
        "curves/x.npz", "2x4", ("fifo", "asha"), ("asha.eta=4",), 20, 16, 1, 3.0
    )
    assert curves.command == (
        "hermes compare --curves examples/curves/x.npz --nodes 2x4 --policies fifo,asha "
        "--policy-option asha.eta=4 --seeds 20 --good 16 --prior-sweeps 1 --switch-seconds 3"
    )
    assert THREE.command == (
        "hermes compare --trace examples/traces/three_jobs.csv --gpus 2 --policies fifo,srsf"
    )


def test_a_policy_that_does_not_exist_is_left_out_with_its_options() -> None:
    case = ComparisonCase(
        "", "4", ("fifo", "none-such", "oracle-best"), ("none-such.a=1", "fifo.b=2")
    )
    assert case.known() == ComparisonCase("", "4", ("fifo", "oracle-best"), ("fifo.b=2",))


def test_figures_are_computed_once_and_read_after_that(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    found = THREE.results(Reuse.KNOWN)
    assert [r.policy for r in found.results] == ["fifo", "srsf"]
    assert len(list(kept.iterdir())) == 2
    monkeypatch.setattr(comparison_case, "compare", lambda *_, **__: pytest.fail("simulated"))
    again = THREE.results(Reuse.KNOWN)
    assert [r.metrics for r in again.results] == [r.metrics for r in found.results]
    assert again.results_of("srsf")[0].completions_s == (2.0, 10.0, 16.0)


def test_figures_of_another_program_are_taken_only_where_all_known_ones_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = THREE.results(Reuse.SAME)
    monkeypatch.setattr(comparison_case, "compare", _interrupted)
    assert THREE.results(Reuse.SAME).results[0].metrics == first.results[0].metrics
    monkeypatch.setattr(comparison_case, "version", lambda *_: "another")
    for take in (Reuse.KNOWN, Reuse.KEPT):
        assert THREE.results(take).results[0].metrics == first.results[0].metrics
    with pytest.raises(InterruptedError):
        THREE.results(Reuse.SAME)


def test_an_interrupted_call_goes_on_behind_the_policies_that_it_had_done(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    replace(THREE, policies=("fifo",)).results(Reuse.SAME)
    simulated: list[str] = []

    def noted(task: WorkloadSource, gpus: tuple[Gpu, ...], chosen: Sequence[Contender], *args: Any,
              **rest: Any) -> Comparison:  # fmt: skip
        simulated.extend(one.name for one in chosen)
        return compare(task, gpus, chosen, *args, **rest)

    monkeypatch.setattr(comparison_case, "compare", noted)
    THREE.results(Reuse.SAME)
    assert simulated == ["srsf"]
    assert sorted(path.suffix for path in kept.iterdir()) == [".json", ".json"]


def test_figures_that_are_not_kept_are_not_computed_where_only_kept_ones_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison_case, "compare", _interrupted)
    with pytest.raises(FiguresMissing, match="--policies fifo"):
        THREE.results(Reuse.KEPT)


def _interrupted(*_: object, **__: object) -> None:
    raise InterruptedError


def test_a_version_changes_with_the_numbers_that_a_policy_has_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "curves.npz"
    data.write_bytes(b"one")
    monkeypatch.setattr(comparison_case, "ROOT", tmp_path)
    shutil.copytree(ROOT / "hermes_ops", tmp_path / "hermes_ops")
    learnt = tmp_path / "hermes_ops/policies/frontrunner/correction.json"
    found = []
    for text in ("{}", "[]"):
        learnt.write_text(text)
        version.cache_clear()
        found.append((version("frontrunner", data), version("fifo", data)))
    version.cache_clear()
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_a_version_changes_with_the_data_and_differs_by_policy(tmp_path: Path) -> None:
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("1")
    two.write_text("2")
    assert version("fifo", one) != version("fifo", two)
    assert version("fifo", one) != version("slaq", one)


def test_a_policy_depends_on_the_modules_that_it_imports_and_on_no_other_policy() -> None:
    fifo, slaq = (
        set(
            comparison_case._modules(
                ["hermes_ops.simulator.comparison", f"hermes_ops.policies.{p}"]
            )
        )
        for p in ("fifo", "slaq")
    )
    assert {"hermes_ops.policies.toolbox.curve_fit", "hermes_ops.simulator.cluster"} <= slaq
    shared = "hermes_ops.policies.toolbox."
    found = {n for n in fifo if n.startswith("hermes_ops.policies") and not n.startswith(shared)}
    assert found == {"hermes_ops.policies.fifo", "hermes_ops.policies.priority"}


def test_the_three_jobs_are_those_of_the_paper() -> None:
    text = three_jobs(Reuse.SAME)
    for row in ("| srsf | 2, 10, 16 | 2, 10, 16 | 9.33 |",
                "| 2d-gittins | 2, 12, 16 | 2, 12, 16 | 10.00 |",
                "| 2d-las | 5, 14, 16 | 5, 14, 16 | 11.67 |"):  # fmt: skip
        assert row in text


def test_equal_means_as_many_digits_as_were_published() -> None:
    assert _off(1556.4833, 1556.48, 2) == "equal"
    assert _off(1556.4893, 1556.48, 2) == "+0.00 %"
    assert _off(225_904.4, 225_904, 0) == "equal"
    assert _off(98.0, 100, 0) == "-2.00 %"


def test_several_files_count_alike_in_a_pooled_speed_up() -> None:
    found = THREE.results(Reuse.KNOWN)
    one = found.speed_up("srsf", "mean_completion_seconds", "fifo")
    both = pooled([found, found], "srsf", "mean_completion_seconds", "fifo")
    assert one is not None
    assert both is not None
    assert both.mean == pytest.approx(one.mean)


def test_brackets_are_no_pattern_for_the_shell() -> None:
    line = _quoted("hermes compare --policy-option 2d-las.limits_gpu_s=[4,8] --gpus 2")
    assert line == "hermes compare --policy-option '2d-las.limits_gpu_s=[4,8]' --gpus 2"


def test_a_section_whose_figures_are_not_kept_stays_on_the_page_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(take: Reuse) -> str:
        raise FiguresMissing("hermes compare")

    written = {
        "first": lambda _: "## First\n\n1\n",
        "second": unknown,
        "third": unknown,
    }
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- first -->\n## First\n\n0\n\n<!-- second -->\n## Second\n\n2\n")
    monkeypatch.setattr(comparison, "SECTIONS", written)
    monkeypatch.setattr(comparison, "PAGE", page)
    assert comparison.main(["first"]) == 0
    kept = "<!-- first -->\n## First\n\n1\n\n<!-- second -->\n## Second\n\n2\n"
    assert page.read_text() == f"{comparison.HEAD}\n{kept}"
    assert comparison.sections(page.read_text()).keys() == {"first", "second"}


def test_figures_of_elastic_jobs_are_kept_by_their_command_and_are_missing_before(
    kept: Path,
) -> None:
    case = ElasticCase("w", "--workload shockwave", ("fifo",))
    with pytest.raises(FiguresMissing, match="hermes compare --workload shockwave"):
        case.document(Reuse.KEPT)
    document = case.document(Reuse.SAME)
    assert document["policies"]["fifo"]["makespan_seconds"]["mean"] == pytest.approx(31_449, abs=1)
    (file,) = kept.iterdir()
    file.write_text(file.read_text().replace('"mean": 31', '"mean": 99'))
    assert case.document(Reuse.SAME)["policies"]["fifo"]["makespan_seconds"]["mean"] > 99_000
    assert case.document(Reuse.KEPT) == case.document(Reuse.SAME)


def test_the_table_of_teams_has_the_waiting_and_the_fairness_of_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs: within quotas the short job takes that of its team back from a long one."""
    (tmp_path / "traces").mkdir()
    header = "job_id,submit_time_s,num_gpus,duration_s,vc\n"
    rows = "a,0,1,100,ee9e8c\nb,0,1,100,ee9e8c\nc,1,1,10,7f04ca\n"
    (tmp_path / "traces" / "two.csv").write_text(header + rows)
    monkeypatch.setenv("HERMES_DATA", str(tmp_path))
    policies = ("fifo", "yarn-cs", "fifo+quota", "2d-las+quota")
    small = replace(PHILLY, file="traces/two.csv", gpus="170", policies=policies)
    (tmp_path / "teams.yaml").write_text(
        "teams: [{name: ee9e8c, guaranteed: 1}, {name: 7f04ca, guaranteed: 1}]"
    )
    monkeypatch.setattr(comparison_case, "EXAMPLES", tmp_path)
    monkeypatch.setattr(comparison_teams, "PHILLY", replace(small, gpus="2", teams="teams.yaml"))
    text = teams(Reuse.SAME)
    assert (
        "hermes compare --trace examples/traces/two.csv --gpus 2 --teams examples/teams.yaml "
        "--policies fifo,yarn-cs,fifo+quota,2d-las+quota"
    ) in text
    assert "| ee9e8c | 2 | 0 | 0 | 5.00 | 5.00 |" in text
    assert "| 7f04ca | 1 | 99.00 | 99.00 | 0 | 0 |" in text
    assert teams(Reuse.KEPT) == text
