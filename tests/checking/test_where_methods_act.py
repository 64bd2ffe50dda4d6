"""What the handle lists is what changes: for every method, each layer is run by itself on the input that it had, with
the method and in a plain copy of the model. They differ (or a penalty is made) where the method is listed, and nowhere
else."""

import copy

import pytest
import torch
from torch import nn

import dampen
from dampen.hooks.discover.sites import parts_of
from dampen.registry import methods
from dampen.regularizer import MODEL_STAGES, UnsupportedModel
from tests.families import NanoBlock
from tests.hooks.odd_layers import AllAtOnce, D, Experts, Hybrid, ParameterMixture, Sparse

X = torch.randn(3, 6, D, generator=torch.Generator().manual_seed(0))
STRONG = {"rate": 0.5, "weight": 1.0}
ARGUMENTS = {
    "hard_masking": {"rate": 0.5, "top": 0.5},
    "skip_ablation": {"attention": True},
    "explicit_dropout": {"value": 1.0, "ffn": 1.0, "rate": 0.3},
    "arora_dropout": {"value": 1.0, "ffn": 1.0, "rate": 0.3},
    "attention_entropy": {"weight": 1.0, "floor": 0.999},
    "blurred_attention": {"width": 3, "sigma": 1.0},
}
MODELS = {
    "hybrid": lambda: Hybrid(),
    "experts": lambda: Sparse(lambda: Experts(3)),
    "parameter experts": lambda: Sparse(lambda: ParameterMixture(3)),
    "all at once": lambda: Sparse(lambda: AllAtOnce(3)),
    "blocks": lambda: nn.Sequential(NanoBlock(), NanoBlock(), NanoBlock()),
}
NAMES = [
    name
    for name, cls in methods().items()
    if (cls().stages - set(MODEL_STAGES) - {"tokens"} or name in ARGUMENTS)
    and not cls.needs_adapters
]


def make(name):
    """A method strong enough to be seen, the same in every layer."""
    cls = methods()[name]
    if name in ARGUMENTS:
        return cls(**ARGUMENTS[name])
    given = {key: STRONG[key] for key in ("rate", "weight") if key in cls(**cls.example).schedules}
    return cls(**cls.example | given)


def layers_of(model):
    """The blocks of these models, by name, as they are written."""
    blocks = model if isinstance(model, nn.Sequential) else model.layers
    prefix = "" if blocks is model else "layers."
    return {f"{prefix}{i}": block for i, block in enumerate(blocks)}


def inputs_of(model):
    given = {}
    hooks = [
        block.register_forward_pre_hook(lambda m, args, n=name: given.setdefault(n, args))
        for name, block in layers_of(model).items()
    ]
    model(X)
    for hook in hooks:
        hook.remove()
    return given


def acting(model, plain, reg, given):
    """The layers whose function differs from the plain one, or that leave a penalty."""
    found = set()
    reference = layers_of(plain)
    for name, block in layers_of(model).items():
        for seed in range(6):
            torch.manual_seed(seed)
            differs = not torch.allclose(
                block(*given[name]), reference[name](*given[name]), atol=1e-6
            )
            made = [v for v in reg._taken().values() if v.item() != 0]
            if differs or made:
                found.add(name)
                break
    return found


REFUSED = {
    (name, kind)
    for name in ("mixout", "explicit_mixout", "l2_sp", "concrete_dropout")
    for kind in ("parameter experts", "all at once")
}


@pytest.mark.parametrize("where", ["*", "one"])
@pytest.mark.parametrize("subject", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_method_acts_where_it_is_listed_and_nowhere_else(name, subject, where):
    torch.manual_seed(0)
    model = MODELS[subject]().train()
    method, last = make(name), list(layers_of(model))[-1]
    sites = "*" if where == "*" else [last, f"{last}.*"]
    if (name, subject) in REFUSED:
        with pytest.raises(
            UnsupportedModel, match=r"slices of parameters \(.*experts.gate_up_proj"
        ):
            dampen.regularize(model, method, target_modules=sites)
        return
    plain = copy.deepcopy(model)
    reg = dampen.regularize(model, method, target_modules=sites, strict=False)
    with torch.no_grad():  # away from where it started, for methods that go back there
        moved = {key: value + 0.05 * value.sign() for key, value in model.state_dict().items()}
    model.load_state_dict(moved)
    plain.load_state_dict(moved)
    given = inputs_of(plain)
    listed = {layer.site.name for layer in reg.layers if layer.reached.get(method.name)}
    assert listed <= ({last} if where == "one" else set(layers_of(model)))
    assert acting(model, plain, reg, given) == listed
    assert ("(partial)" in str(reg)) == any(
        layer.reached.get(method.name) != parts_of(method) for layer in reg.layers
    )
