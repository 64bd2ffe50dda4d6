"""Benchmarks, and the slow, obvious formulations that serve as oracles of the tests."""
