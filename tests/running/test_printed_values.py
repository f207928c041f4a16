"""Numbers that a script prints or logs are heard; those of the machine are not."""

import logging

import pytest
import torch

from floatline.probe.watch.patches import Patches
from floatline.running.read_values import PrintedValues, find_numbers


def names_of(text):
    return {name: value for name, value, _ in find_numbers(text)}


@pytest.fixture
def heard():
    """Runs a function; gives what it printed, by the word before each number."""

    def run(work):
        printed, patches = PrintedValues(), Patches()
        printed.patch(patches)
        try:
            work()
        finally:
            patches.undo()
        assert all("test_printed_values.py:" in place for place in printed.places)
        return {place.partition("(")[2].rstrip(")"): numbers for place, numbers in printed.places.items()}

    return run


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("kept 8.019 final loss 0.3777", {"kept": 8.019, "loss": 0.3777}),
        ("{'step': 10, 'loss': -1.3958e-05}", {"step": 10.0, "loss": -1.3958e-05}),
        ("acc=95.0% val_loss: .5", {"acc": 95.0, "val_loss": 0.5}),
        ("0.25 0.5", {"number 1": 0.25, "number 2": 0.5}),
        ("bfloat16 conv2d v1.2.3", {}),
    ],
)
def test_numbers_are_known_by_the_word_before_them(text, numbers):
    assert names_of(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "time 12.3",
        "12.3s",
        "it took 5 seconds",
        "{'eval_runtime': 0.055, 'eval_samples_per_second': 581.2}",
        "latency 0.31, walltime: 12.5",
        "30.2ms",
        "5.2 it/s",
        "mem 3.1",
        "2 GiB",
        "2026-11-17 14:00:01,250",
        "eta 3",
        "loss scale 65536",
        "\n    skipped 3",
        "elapsed_time 4.5",
    ],
)
def test_numbers_of_the_machine_are_left_out(text):
    assert names_of(text) == {}
    assert names_of(text + ", loss 0.5")["loss"] == 0.5


@pytest.mark.parametrize(("number", "digit"), [("8.019", 1e-3), ("7.3e-09", 1e-10), ("12", 1.0), ("nan", 0.0)])
def test_the_last_digit_is_known(number, digit):
    ((_, _, found),) = find_numbers(f"loss {number}")
    assert found == pytest.approx(digit)


def test_what_is_printed_and_logged_is_heard_and_still_printed(heard, capsys, caplog):
    def work():
        for i in range(3):
            print(f"accuracy {i / 4:.2f}", i)  # noqa: T201
        with caplog.at_level(logging.INFO):
            logging.getLogger("some").info("recall %.3f", 0.125)

    assert heard(work) == {"accuracy": [0.0, 0.25, 0.5], "number 1": [0.0, 1.0, 2.0], "recall": [0.125]}
    assert "accuracy 0.25 1" in capsys.readouterr().out


def test_what_goes_to_a_file_is_not_heard(heard, tmp_path):
    def work():
        with (tmp_path / "log").open("w") as file:
            print("loss 0.5", file=file)

    assert heard(work) == {}


def test_the_exponent_of_a_power_goes_by_the_word_of_its_base():
    assert find_numbers("loss=0.25 scale=2^15") == [("loss", 0.25, 0.01)]
    assert [name for name, _, _ in find_numbers("width 2^15")] == ["width", "width 2"]


def test_the_exponent_of_a_number_is_no_word():
    assert [name for name, _, _ in find_numbers("  14  3.052e-06    10.442      4194304  yes")] == [
        f"number {number}" for number in (1, 2, 3, 4)
    ]


def test_a_loss_scale_that_is_printed_without_a_word_is_known_by_where_it_came_from(heard):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    known = heard(lambda: print(3, 0.5, scaler.get_scale(), 0.25))  # noqa: T201
    assert known == {"number 1": [3.0], "number 2": [0.5], "number 3": [0.25]}
    same = heard(lambda: print(3, 0.5, 8.0, 0.25))  # noqa: T201
    assert same == {"number 1": [3.0], "number 2": [0.5], "number 3": [8.0], "number 4": [0.25]}
