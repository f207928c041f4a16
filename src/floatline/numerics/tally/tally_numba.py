"""The counting loop over 16-bit patterns, compiled by numba when this module is first imported (0.8 s)."""

import numba
import numpy as np


# No `cache=True`: it saves a quarter of the wait, and writes into the package's folder or the user's home for it.
@numba.njit("void(uint64[::1], uint64, uint32[:, ::1])", nogil=True)
def count_words(words, mask, table):
    """Add the four 16-bit patterns of each word, masked, to the two rows of a table.

    A counter that was just written is slow to read again: with two rows, equal neighbours do not wait for each other.
    Four rows would leave the cache.
    """
    one = np.uint32(1)
    even, odd = table[0], table[1]
    for i in range(words.size):
        word = words[i]
        even[word & mask] += one
        odd[(word >> np.uint64(16)) & mask] += one
        even[(word >> np.uint64(32)) & mask] += one
        odd[(word >> np.uint64(48)) & mask] += one
