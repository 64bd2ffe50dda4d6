"""Figures that only the papers' pages need. The package `reproductions` registers each one as a plug-in does.

A figure is a function of a table and a palette that returns a Figure, or None where the runs have no data for it.
"""
