"""Philox against the published vectors of its authors (Random123, kat_vectors)."""

import torch

from floatline.numerics.rounding import philox, random_words

# counter words, key words, result words
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_philox_gives_the_published_words():
    for counter, key, result in KNOWN:
        low, high = words(key)
        counters = tuple(torch.tensor([word]) for word in words(counter))
        assert [int(word) for word in philox(counters, seed=low | high << 32)] == words(result)


def test_a_piece_of_the_range_holds_the_same_words_as_the_whole():
    whole = random_words(1000, seed=7, step=3, stream=5)
    for start, count in [(0, 1), (1, 2), (3, 10), (500, 499), (997, 3)]:
        assert torch.equal(random_words(count, seed=7, step=3, stream=5, start=start), whole[start : start + count])


def test_every_part_of_the_key_changes_the_words():
    base = random_words(64, seed=1, step=1, stream=1)
    for other in (dict(seed=2, step=1, stream=1), dict(seed=1, step=2, stream=1), dict(seed=1, step=1, stream=2)):
        assert not torch.equal(random_words(64, **other), base)
    assert not torch.equal(random_words(64, seed=1, step=1, stream=1, start=1 << 34), base)


def test_each_bit_is_set_half_of_the_time():
    drawn = random_words(1 << 16, seed=11)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1 << 32
    for bit in range(32):
        share = ((drawn >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / 256  # five standard errors


def test_no_words_are_asked_for_no_elements():
    assert random_words(0, seed=1).shape == (0,)
