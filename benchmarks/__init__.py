"""Benchmarks, and the slow, obvious formulations that serve as oracles of the tests."""

import dampen  # noqa: F401 - before timm and the like: it cures a torchvision that was built for another torch
