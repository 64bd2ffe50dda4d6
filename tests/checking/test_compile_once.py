"""Every method compiles once: the first step leaves nothing behind that would compile the second one anew."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import dampen
from dampen.checking.subjects import adapted, with_companion, with_example
from dampen.registry import methods

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", methods())
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_one_graph_over_the_first_steps(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=12)
    model = adapted(model, methods()[name]).train()
    reg = dampen.regularize(model, with_companion([with_example(methods()[name])()]))
    counter = CompileCounter()
    run = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(3):  # from the very first: no eager forward before
        reg.progress(step / 3)
        loss, _ = reg.loss(lambda: run(X), lambda out: out.square().mean())
        loss.backward()
    # the start of a fine-tuning runs in eval mode, which is a graph of its own
    assert counter.frame_count == 1 + (reg.start is not None)
    torch._dynamo.reset()
