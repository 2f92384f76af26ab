"""The mpi_shm world: the same cases as loopback, between processes, and what processes can do."""

from __future__ import annotations

import sys

import pytest
from launch import run_command, run_program
from world_cases import CASES

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_case_holds_between_processes(ranks):
    done = run_program("cases", ranks)
    assert done.returncode == 0, done.output
    assert f"{len(CASES)} cases passed on {ranks} ranks" in done.output


def refusals(case: str, ranks: int = 3) -> list[str]:
    """Return what each rank says it was refused with."""
    done = run_program("refusals", ranks, case, limit_s=60)
    assert done.returncode == 0, done.output
    return [line for line in done.output.splitlines() if line.startswith("refused: ")]


def test_all_ranks_refuse_together_where_one_sees_too_little_shared_memory():
    said = refusals("shm")
    assert len(said) == 3 and len(set(said)) == 1
    assert "WorldError: 3 ranks need" in said[0] and "/dev/shm has 65536 free" in said[0]


def test_ranks_that_share_no_memory_are_refused_with_their_hosts():
    said = refusals("hosts")
    assert len(said) == 3 and all("needs all ranks on one host" in line for line in said)


def test_another_number_of_ranks_than_the_launcher_started_is_refused():
    said = refusals("ranks", ranks=2)
    assert len(said) == 2 and all("ranks = 17" in s and "None or 2" in s for s in said)


def test_loopback_under_a_launcher_is_refused():
    said = refusals("loopback", ranks=2)
    assert len(said) == 2 and all("OMPI_COMM_WORLD_SIZE" in line for line in said)


def test_a_rank_that_leaves_with_its_own_exception_ends_the_others_waits_at_once():
    said = sorted(refusals("raise"))
    assert len(said) == 3
    assert all("ProtocolTimeout" in s and "rank 1" in s for s in said[:2])
    assert said[2] == "refused: ZeroDivisionError: of the user's own"


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("where", ["forward", "between"])
def test_survivors_of_a_killed_rank_time_out_and_close_within_the_limit(where, then):
    done = run_program("killed_rank", 3, where, then, fault_tolerant=True, limit_s=60)
    survivors = [s for s in done.output.splitlines() if s.startswith("survivor")]
    assert sorted(s.split(":")[0] for s in survivors) == ["survivor 0", "survivor 2"], done.output
    assert any(s.endswith("of rank 1") for s in survivors), done.output


def test_a_launcher_of_another_mpi_is_named_together_with_the_one_in_use():
    program = "import tileflow; tileflow.init('mpi_shm')"
    done = run_command([sys.executable, "-c", program], OMPI_COMM_WORLD_SIZE="2", limit_s=60)
    assert done.returncode == 1
    assert "WorldError" in done.output and "OMPI_COMM_WORLD_SIZE" in done.output
    assert "MPI v" in done.output and "sees one" in done.output, done.output


def test_one_process_without_a_launcher_is_a_world_of_one_rank():
    program = """
import tileflow
from layer_problems import assert_right, problem
case = problem(ranks=1)
with tileflow.init("mpi_shm") as world:
    assert (world.size, world.rank, world.device_ranks()) == (1, 0, (0,))
    assert_right(case, world.run(lambda w: case.layer(w)(*case.arguments(0))))
"""
    done = run_command([sys.executable, "-c", program], limit_s=60)
    assert done.returncode == 0, done.output


def test_importing_tileflow_starts_no_mpi():
    program = "import sys, tileflow; assert not {'mpi4py', 'cupy'} & set(sys.modules)"
    assert run_command([sys.executable, "-c", program], limit_s=60).returncode == 0
