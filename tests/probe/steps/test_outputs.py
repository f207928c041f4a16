"""Outputs of a forward pass: found by name, and held against FP32's."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from floatline.probe.steps.outputs import find_logits, match_output, name_outputs


@dataclass
class Given:
    logits: torch.Tensor
    extra: object = None


def test_outputs_are_named_by_keys_fields_and_places():
    one = torch.ones(2)
    assert list(name_outputs(one)) == ["output"]
    assert list(name_outputs((one, [one]))) == ["output[0]", "output[1][0]"]
    assert list(name_outputs({"boxes": one, "more": {"scores": one}})) == ["boxes", "more.scores"]
    assert list(name_outputs(Given(one, ("text", one)))) == ["logits", "extra[1]"]
    assert name_outputs("text") == {}


def test_logits_are_known_by_their_name_or_by_the_size_of_a_table():
    model = nn.Sequential(nn.Embedding(30, 4), nn.Linear(4, 30))
    assert find_logits(model, {"output": torch.ones(2, 5, 30)}) == {"output"}
    assert find_logits(model, {"output": torch.ones(2, 5, 31), "ids": torch.ones(2, 5, 30).long()}) == set()
    assert find_logits(model, {"last_hidden_state": torch.ones(2, 5, 30)}) == set()
    assert find_logits(nn.Linear(4, 4), {"logits": torch.ones(2, 9)}) == {"logits"}


def test_an_error_is_a_share_of_the_size():
    wide = torch.tensor([3.0, 4.0])
    match = match_output("x", torch.tensor([3.0, 4.5]), wide)
    assert match.error == pytest.approx(0.1)
    assert match.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert match.distance == match.error
    assert match_output("x", wide, wide).error == 0.0


def test_logits_that_all_move_by_the_same_are_the_same():
    wide = torch.randn(5, 20, dtype=torch.float64)
    moved = match_output("logits", wide + 7.0, wide, logits=True)
    assert moved.error < 1e-12
    assert moved.kl == pytest.approx(0.0, abs=1e-12)
    assert moved.top1 == 1.0
    assert match_output("numbers", wide + 7.0, wide).error > 1


def test_kl_is_that_of_its_definition():
    wide, own = torch.randn(3, 4, 12), torch.randn(3, 4, 12)
    expected = (
        torch.nn.functional.kl_div(own.log_softmax(-1), wide.log_softmax(-1), log_target=True, reduction="sum") / 12
    )
    match = match_output("logits", own, wide, logits=True)
    assert match.kl == pytest.approx(float(expected), rel=1e-5)
    assert match.top1 == pytest.approx(float((own.argmax(-1) == wide.argmax(-1)).float().mean()))


def test_a_few_huge_logits_do_not_hide_the_others():
    wide = torch.randn(4, 16)
    wide[:, 0] = -30000.0
    own = wide.clone()
    own[:, 1:] = torch.randn(4, 15)
    match = match_output("logits", own, wide, logits=True)
    assert match.error < 0.001
    assert match.distance > 0.5


def test_tokens_that_are_ruled_out_in_both_are_no_difference():
    wide = torch.randn(2, 10)
    wide[:, 3] = -math.inf
    assert match_output("logits", wide, wide, logits=True).distance == 0.0
    assert match_output("numbers", wide, wide).error == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_in_one_alone_is_infinitely_far(bad):
    own = torch.ones(4)
    own[2] = bad
    assert match_output("x", own, torch.ones(4)).error == math.inf


def test_choices_are_compared_one_by_one():
    match = match_output("ids", torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]))
    assert (match.kind, match.error) == ("choices", 0.25)
    assert match_output("ids", torch.tensor([1]), torch.tensor([1, 2])).error == math.inf
