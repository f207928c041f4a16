"""Proof: errors of outputs, and random inputs of the same kind."""

import math

import torch

from floatline.folding.proof import Proof, draw_inputs, relative_error


def test_an_error_is_zero_only_bit_for_bit():
    x = [torch.tensor([3.0, 4.0])]
    assert relative_error([x[0].clone()], x) == 0.0
    nearest = [torch.nextafter(x[0], torch.tensor(9.0))]
    assert 0 < relative_error(nearest, x) < 2.0**-22
    assert relative_error([torch.tensor([3.0, 9.0])], x) == 1.0


def test_what_is_not_finite_is_infinitely_far():
    x = [torch.tensor([1.0, 2.0])]
    for wrong in (math.nan, math.inf):
        assert relative_error([torch.tensor([1.0, wrong])], x) == math.inf
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == math.inf


def test_a_proof_holds_within_its_tolerance_and_not_beyond():
    numbers = {"trials": 3, "equal": 2, "fp16_before": 1.0, "fp16_after": 1.0, "bf16": 1.0}
    assert Proof(difference=1e-6, tolerance=1e-6, **numbers).holds
    assert not Proof(difference=1e-6, tolerance=0.0, **numbers).holds
    assert not Proof(difference=math.nan, tolerance=1.0, **numbers).holds


def test_tokens_are_drawn_from_the_vocabulary_and_masks_stay():
    inputs = {
        "ids": torch.zeros(2, 400, dtype=torch.int64),
        "mask": torch.ones(2, 400),
        "flag": False,
        "x": torch.rand(9),
    }
    numbers = {name: number for number, name in enumerate(inputs)}
    drawn = draw_inputs(inputs, {numbers["ids"]: 7}, torch.Generator().manual_seed(0))
    assert set(drawn["ids"].flatten().tolist()) == set(range(7))
    assert torch.equal(drawn["mask"], inputs["mask"])  # a constant has no spread
    assert drawn["flag"] is False
    assert not torch.equal(drawn["x"], inputs["x"])
    again = draw_inputs(inputs, {numbers["ids"]: 7}, torch.Generator().manual_seed(0))
    assert torch.equal(again["ids"], drawn["ids"])
