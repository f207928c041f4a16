"""Log-probs of a model against a file: drift is measured, the nearer side told, and remedies tried."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from tests.agreement.models import make_decoder

import floatline as fl
from floatline.agreement.logprobs.files import Scored, read_scored
from floatline.agreement.logprobs.ratios import measure_ratios
from floatline.agreement.logprobs.scoring import score
from floatline.errors import ParityError

START, LENGTH = 4, 14


def make_sequences(num: int = 6) -> list[Scored]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 40, (num, LENGTH), generator=generator)
    return [Scored(row, torch.zeros(LENGTH - START, dtype=torch.float64)) for row in ids]


def make_model(dtype: torch.dtype):
    """Weights that BF16 holds, large enough for logits that differ."""
    model = make_decoder(dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model.bfloat16().to(dtype).eval()


def write_rollout(path, dtype: torch.dtype, *, change=None):
    sequences = make_sequences()
    with fl.HalfOnCPU():
        values = score(make_model(dtype), sequences, batch_size=1)
    values = values if change is None else change(values)
    rows = values.view(len(sequences), -1)
    lines = [{"tokens": s.tokens.tolist(), "logprobs": row.tolist()} for s, row in zip(sequences, rows, strict=True)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def compare(path, dtype: torch.dtype = torch.bfloat16):
    with fl.HalfOnCPU():
        return fl.parity(make_model(dtype), path)


def test_a_rollout_in_the_same_arithmetic_has_no_drift(tmp_path):
    found = compare(write_rollout(tmp_path / "rollout.jsonl", torch.bfloat16))
    assert (found.verdict, found.ratios.outside, found.best) == ("agree", 0.0, None)
    assert found.ratios.num_tokens == 6 * (LENGTH - START)


def test_a_rollout_in_fp16_is_nearer_to_fp32_and_fp16_scoring_is_what_helps(tmp_path):
    found = compare(write_rollout(tmp_path / "rollout.jsonl", torch.float16))
    assert found.reading.side != "B"
    assert found.reading.b < found.reading.a / 2
    assert found.ratios.outside > 0.05
    assert found.best.name == "FP16 scoring"
    assert found.best.ratios.kl < found.ratios.kl / 100
    tried = {one.name: one for one in found.remedies}
    assert {"FP32 head", "FP32 norms", "1 sequence at a time", "attention from its definition"} <= set(tried)
    assert tried["FP32 scoring"].gap_to_fp32 == 0
    assert "does not show" in str(found)


def test_one_wrong_token_is_found_with_its_place(tmp_path):
    def wrong(values):
        values[13] -= 4.0
        return values

    found = compare(write_rollout(tmp_path / "rollout.jsonl", torch.bfloat16, change=wrong))
    first = found.ratios.carriers[0]
    assert found.verdict in ("farther", "wrong")
    assert found.reading.side == "B"
    assert (first.sequence, first.position) == (1, START + 3)
    assert first.share > 0.9


def test_logprobs_of_another_temperature_are_wrong(tmp_path):
    found = compare(write_rollout(tmp_path / "rollout.jsonl", torch.bfloat16, change=lambda values: values * 1.5))
    assert (found.verdict, found.reading.side) == ("wrong", "B")


def test_ratios_and_divergence_are_as_defined():
    one = [Scored(torch.arange(4), torch.zeros(3))]
    theirs = torch.tensor([-1.0, math.nan, -2.0], dtype=torch.float64)
    ours = theirs + torch.tensor([math.log(2.0), 0.0, math.log(1.05)], dtype=torch.float64)
    found = measure_ratios(ours, theirs, one, (0.9, 1.1))
    assert found.num_tokens == 2
    assert found.outside == 0.5
    assert found.kl == pytest.approx((2 - 1 - math.log(2)) + (1.05 - 1 - math.log(1.05)))
    assert measure_ratios(ours, theirs, one, (0.4, 2.1)).outside == 0


def test_safetensors_and_json_lines_hold_the_same(tmp_path):
    path = write_rollout(tmp_path / "rollout.jsonl", torch.bfloat16)
    rows = read_scored(path)
    tensors = {"tokens": torch.stack([r.tokens for r in rows]), "logprobs": torch.stack([r.logprobs for r in rows])}
    save_file(tensors, tmp_path / "rollout.safetensors")
    again = read_scored(tmp_path / "rollout.safetensors")
    assert all(torch.equal(a.logprobs, b.logprobs) and a.start == b.start for a, b in zip(rows, again, strict=True))
    save_file(tensors | {"mask": torch.zeros(6, LENGTH - START)}, tmp_path / "none.safetensors")
    with pytest.raises(ParityError, match="holds no log-prob"):
        read_scored(tmp_path / "none.safetensors")


BAD = {
    "not json": ("{", "Line 1 of .* is not JSON"),
    "no lists": ('{"tokens": "a"}', "Line 1 of .* has no lists 'tokens' and 'logprobs'"),
    "booleans": ('{"tokens": [true], "logprobs": [-1]}', "has no lists"),
    "too many": ('{"tokens": [1], "logprobs": [-1, -2]}', "2 log-probs stand beside 1 tokens"),
    "above 0": ('{"tokens": [1, 2], "logprobs": [0.5]}', "a log-prob is 0.5, above 0"),
    "empty": ("", "holds no log-prob"),
    "deep": ("[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_line(name, tmp_path):
    text, said = BAD[name]
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ParityError, match=said) as caught:
        read_scored(tmp_path / "bad.jsonl")
    assert "\n" not in str(caught.value)


def test_a_token_that_the_model_does_not_know_gets_one_line(tmp_path):
    (tmp_path / "far.jsonl").write_text('{"tokens": [1, 39], "logprobs": [-1]}')
    assert compare(tmp_path / "far.jsonl").ratios.num_tokens == 1
    (tmp_path / "far.jsonl").write_text('{"tokens": [1, 40], "logprobs": [-1]}')
    with pytest.raises((ParityError, IndexError)):
        compare(tmp_path / "far.jsonl")
    with pytest.raises(ParityError, match="cannot be read"):
        compare(tmp_path / "missing.jsonl")
