"""Philox4x32-7 (Salmon et al., SC 2011) in Python's integers: the oracle of the kernels' draws."""

import struct

LOW = 0xFFFFFFFF


def philox(counter, key, rounds=7):
    """Of integers, or of arrays of 64 bits."""
    a, b, c, d = counter
    k, m = key
    for _ in range(rounds):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k, second & LOW, (first >> 32) ^ d ^ m, first & LOW
        k, m = (k + 0x9E3779B9) & LOW, (m + 0xBB67AE85) & LOW
    return a, b, c, d


def limit(seed, rate):
    """Of 256 draws, how many hide: the rate rounded at random, by a place that no key has."""
    bits = philox((LOW,) * 4, (seed & LOW, seed >> 32))[0]
    return int(rate * 256 + (bits >> 8) / 2**24)


def hidden(seed, rate, sample, head, query, key):
    words = philox((key // 16, query, head, sample), (seed & LOW, seed >> 32))
    return struct.pack("<4I", *words)[key % 16] < limit(seed, rate)
