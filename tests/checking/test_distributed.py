"""Contract 13 on every method: two gloo processes, DDP and FSDP2, in one launch."""

import pytest

from dampen.checking.distributed import check_distributed
from dampen.registry import methods


@pytest.mark.slow
def test_every_method_in_two_processes():
    check_distributed(list(methods().values()))
