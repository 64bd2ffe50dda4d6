"""The documentation's generator."""
