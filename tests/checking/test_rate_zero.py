"""Rate 0 costs nothing: in eager mode the stages of a method whose values are 0 now are not run at all."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import dampen
from dampen import late, linear
from dampen.checking.subjects import adapted
from dampen.registry import methods
from dampen.regularizer import MODEL_STAGES, STEP_STAGES

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


RATES = sorted(
    name for name, cls in methods().items() if cls.stages - {*MODEL_STAGES, *STEP_STAGES}
)


OTHERWISE = ("skip_ablation", "blurred_attention", "mixout", "concrete_dropout")
"""Zero is no identity of theirs, or the value is only where a learned rate starts."""


@pytest.mark.parametrize("name", [n for n in RATES if n not in OTHERWISE])
def test_a_value_of_zero_makes_no_call(name):
    """As many calls as the plain model, then more once the schedule starts."""
    cls = methods()[name]
    values = dict.fromkeys(cls.example or ("rate",), late(0.4, 0.5))
    if "weight" in cls.__init__.__annotations__:
        values = {"weight": late(0.4, 0.5)}
    model = adapted(vit(), cls).train()
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
    assert "nothing runs" not in first
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


def one_layer():
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp=12).train()


@pytest.mark.parametrize(
    "method",
    [
        dampen.DropPath(),
        dampen.DropKey(linear(0.0, 0.3)),
        dampen.DropHead(late(linear(0.0, 0.3), 0.5)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_schedule_that_leaves_nothing_is_refused(method):
    """DropPath's default rises with depth from 0, and a model of one layer has no depth but 0."""
    model = one_layer()
    before = [type(m) for m in model.modules()]
    with pytest.raises(
        ValueError, match=r"rate=.*linear.* would do nothing: on the 1 layer\(s\) chosen"
    ):
        dampen.regularize(
            model, [dampen.DropKey(0.1), method] if method.name != "drop_key" else method
        )
    assert [type(m) for m in model.modules()] == before
    with pytest.raises(ValueError, match="would do nothing"):
        dampen.regularize(vit(), method, target_modules="blocks.1")  # the only layer chosen
    dampen.regularize(vit(), method)


@pytest.mark.parametrize("rate", [0.0, [0.0, 0.0], linear(0.0, 0.0)], ids=str)
def test_what_was_asked_for_at_zero_is_said_to_do_nothing(rate):
    reg = dampen.regularize(vit(), [dampen.DropKey(rate), dampen.DropHead(0.1)])
    assert "DropKey is 0 everywhere for the whole of training: does nothing" in repr(reg)
    assert "DropHead is 0" not in repr(reg)
    assert "is 0 everywhere" not in repr(dampen.regularize(vit(), dampen.DropKey(late(0.4, 0.5))))
