"""The lab: train, compare, measure and report on real data, from one command."""
