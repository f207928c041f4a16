"""Random networks: a fold is the same function bit for bit, and one that forgets a writer is caught."""

from dataclasses import replace

import pytest
import torch
from tests.folding.networks import Network, draw_tokens
from tests.slow import mostly_slow, slow

from floatline.folding import fold
from floatline.folding.proof import prove_fold
from floatline.folding.rewriting import rewrite_model, untie_parameters

SEEDS = mostly_slow(range(48), every=12, rare=4)


@slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fold_of_a_random_network_is_the_same_function(seed):
    result = fold(Network(seed), draw_tokens())
    assert result.verdict == "folded"
    assert result.proof.fp16_before == float("inf")
    assert result.proof.fp16_after < 2 * result.proof.bf16
    if not result.rewrite.shifted:
        assert result.proof.equal == result.proof.trials


@slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fold_that_forgets_a_writer_is_not_proven(seed):
    model, tokens = Network(seed), draw_tokens()
    rewrite = fold(model, tokens).rewrite
    writers = [name for name, power in rewrite.weights.items() if power < 0]
    assert writers
    for forgotten in (writers[0], writers[-1]):
        wrong = Network(seed)
        kept = {name: power for name, power in rewrite.weights.items() if name != forgotten}
        rewrite_model(wrong, replace(rewrite, weights=kept))
        proof = prove_fold(
            model,
            wrong,
            tokens,
            draw=lambda generator: torch.randint(20, tokens.shape, generator=generator),
            keep=(),
            rounded=bool(rewrite.shifted),
            trials=2,
        )
        assert not proof.holds, forgotten


@pytest.mark.parametrize("seed", range(4))
def test_untied_networks_fold_as_well(seed):
    model = Network(seed)
    result = fold(model, draw_tokens(), untie=True)
    assert result.verdict == "folded"
    assert bool(result.untied) == model.tied
    assert untie_parameters(result.model) == ()
