"""Benchmarks, and the slow, obvious formulations that serve as oracles of the tests."""

from dampen._torch import declare_torchvision_operators

declare_torchvision_operators()  # the benchmarks import timm and transformers
