"""One trial, from its plain data to its record. `train.py` has the way of a batch on one screen;
read it first.
"""
