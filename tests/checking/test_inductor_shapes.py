"""Inductor on twelve shapes in one graph: DropKey, and every method with DAMPEN_FULL=1."""

import os

import pytest

from dampen._torch import inductor_draws_as_eager
from dampen.checking.contracts import compiled_dynamic
from dampen.checking.subjects import SUBJECTS, with_example
from dampen.registry import methods

SAMPLED = ["drop_key"]
CHOSEN = list(methods()) if os.environ.get("DAMPEN_FULL") else SAMPLED
# from 11 on: a tenth of 10 keys (HardMasking) is one, and a size of 1 has a graph of its own in torch
LENGTHS = (11, 12, 13, 16, 17, 18, 25, 27, 31, 33, 37, 40)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_twelve_shapes(name):
    with inductor_draws_as_eager():
        make = with_example(methods()[name])
        compiled_dynamic(make, SUBJECTS["vit"], "inductor", LENGTHS)
