"""Rate 0 costs nothing: in eager mode the stages of a method whose values are 0 now are not run at all."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import dampen
from dampen import late, linear
from dampen.registry import methods

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=12).train()


class Count(TorchFunctionMode):
    """The calls of torch while it is open."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def calls(model):
    with Count() as count:
        model(X)
    return count.calls


RATES = sorted(name for name, cls in methods().items() if cls.stages - {"inputs", "embeddings", "outputs"})


@pytest.mark.parametrize("name", [n for n in RATES if n not in ("skip_ablation", "blurred_attention", "mixout")])
def test_a_value_of_zero_makes_no_call(name):
    """As many calls as the plain model, then more once the schedule starts."""
    cls = methods()[name]
    values = dict.fromkeys(cls.example or ("rate",), late(0.4, 0.5))
    if "weight" in cls.__init__.__annotations__:
        values = {"weight": late(0.4, 0.5)}
    model = vit()
    plain = calls(model)
    random = torch.get_rng_state()
    reg = dampen.regularize(model, cls(**values))
    assert calls(model) == plain
    assert torch.equal(torch.get_rng_state(), random)
    assert reg.penalties() == {}
    reg.progress(0.6)
    assert len(calls(model)) > len(plain)


def test_layers_at_zero_are_said_to_be():
    model = vit()
    reg = dampen.regularize(model, dampen.DropKey(linear(0.3, 0.0)))
    model(X)
    first, second = (line for line in repr(reg).splitlines() if line.startswith("  blocks"))
    assert "nothing runs at 0" in second
    assert "nothing" not in first
    assert "skipped" not in repr(reg)


def test_a_compiled_graph_does_not_depend_on_the_number():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = vit()
    reg = dampen.regularize(model, dampen.DropKey(late(0.4, 0.5)))
    counter = CompileCounter()
    run = torch.compile(model, backend=counter, fullgraph=True)
    plain = run(X)
    reg.progress(0.6)
    assert not torch.equal(run(X), plain)
    assert counter.frame_count == 1
    torch._dynamo.reset()


class Temperature(dampen.Regularizer):
    """A method whose identity is 1, not 0, for tests."""

    stochastic = False

    def __init__(self, factor=2.0):
        super().__init__()
        self.scheduled("factor", factor, high=float("inf"))

    def neutral(self):
        super().neutral()
        self.scheduled("factor", 1.0, high=float("inf"))

    def heads(self, o, call):
        return o * self.factor


def test_a_method_whose_zero_is_not_the_identity_is_never_left_out():
    model = vit()
    plain = model(X)
    dampen.regularize(model, Temperature(0.0))
    assert not torch.equal(model(X), plain)
