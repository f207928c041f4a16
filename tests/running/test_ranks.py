"""What launchers say, and where each process keeps its files."""

import pytest

from floatline.running.ranks import count_beside, find_ranks, own_path, path_of, read_number, wait_for_others


@pytest.mark.parametrize(
    ("given", "number", "count"),
    [
        ({}, 0, 1),
        ({"RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 3, 4),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2),
        ({"RANK": "", "SLURM_PROCID": "5"}, 5, 1),
    ],
)
def test_launchers_say_which_process_it_is(given, number, count):
    assert (read_number(given), count_beside(given)) == (number, count)


def test_each_process_has_its_own_file_and_rank_0_the_one_that_was_named(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    for rank in ("0", "2", "11"):
        monkeypatch.setenv("RANK", rank)
        own_path(path).write_text(rank, encoding="utf-8")
    assert {rank: one.read_text(encoding="utf-8") for rank, one in find_ranks(path).items()} == {
        0: "0",
        2: "2",
        11: "11",
    }
    assert path_of(path, 0) == path


def test_nobody_is_waited_for_who_has_left_a_file_or_was_never_started(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.touch()
    wait_for_others(path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_1" / "report.json").touch()
    wait_for_others(path)
