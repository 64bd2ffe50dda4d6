"""Pairs of methods keep the cheap contracts: 1, 3, 5, 9 and 10, eagerly. By family in `make test`, every pair in
`make full`."""

import itertools
import math
from functools import partial

import pytest
import torch

import dampen
from dampen.checking import SUBJECTS, check_contract, check_pair
from dampen.checking.contracts import check_finite, check_leak, same
from dampen.checking.pairs import COMPANIONS
from dampen.checking.subjects import Attached, subject_for, with_example
from dampen.functional.explicit import FORMS
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel
from tests.full import FULL

METHODS = methods()


def families() -> dict[tuple[object, ...], list[str]]:
    """The methods that act at the same hook points, with the same number of passes."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, cls in METHODS.items():
        found.setdefault((cls.stages, cls.passes), []).append(name)
    return found


def method_pairs() -> list[tuple[str, str]]:
    """One method of each family beside one of each other family, the first two of a family, and every method beside
    one that hides keys and one that makes penalties. Every two methods in `make full`."""
    if FULL:
        return list(itertools.combinations(METHODS, 2))
    members = list(families().values())
    pairs = {
        tuple(sorted(pair)) for pair in itertools.combinations([names[0] for names in members], 2)
    }
    pairs |= {tuple(sorted(names[:2])) for names in members if len(names) > 1}
    pairs |= {
        tuple(sorted((a, b))) for a in METHODS for b in ("drop_key", "explicit_dropout") if a != b
    }
    return sorted(pairs)


def test_pairs_by_family_leave_out_no_method_and_no_family():
    pairs = method_pairs()
    assert {name for pair in pairs for name in pair} == set(METHODS)
    family = {name: key for key, names in families().items() for name in names}
    met = {frozenset((family[a], family[b])) for a, b in pairs}
    assert all(frozenset(two) in met for two in itertools.combinations(families(), 2))


@pytest.mark.parametrize(("first", "second"), method_pairs())
def test_pair(first, second):
    """Contracts 1, 3, 5, 9 and 10 for two methods together, eagerly, on an image, a causal and a padded model."""
    for name in ("vit", "llama", "bert"):
        makes = [with_example(METHODS[first]), with_example(METHODS[second])]
        subject = subject_for(makes, SUBJECTS[name])
        try:
            trial = Attached(makes, subject)
        except UnsupportedModel:
            continue
        if not any(m.in_eval for m in trial.reg.methods):
            plain, model = subject.model().eval(), trial.model.eval()
            same(
                subject.logits(model(**trial.inputs)), subject.logits(plain(**trial.inputs)), "eval"
            )
            model.train()
        check_finite(trial)
        same(trial.step()[0], trial.step()[0], "two steps with one seed")
        check_leak(trial)
        neutral = Attached(makes, subject, neutral=True).step()[2]
        same(
            neutral,
            subject.logits(subject.model()(**trial.inputs)),
            "rate 0 and no regularizer",
            1e-5,
        )


# --- order and clean operands -------------------------------------------------------------------

ATTENDED = {
    form: partial(dampen.ExplicitDropout, attended_value=0.3, form=form)
    for form in ("paper", "exact")
}
TERMS = {"query": 0.3, "key": 0.2, "value": 0.2, "query_key": 0.1, "ffn": 0.4, "output": 0.2}
SETTINGS = {
    **METHODS,
    **{
        f"explicit_{f}": partial(dampen.ExplicitDropout, **TERMS, residual=0.1, form=f)
        for f in FORMS
    },
    "explicit_detached": partial(dampen.ExplicitDropout, **TERMS, form="exact", detach_inputs=True),
    "explicit_visible": partial(
        dampen.ExplicitDropout, query=0.3, query_key=0.2, visible_only=True, reduction="token_mean"
    ),
    "explicit_shared": partial(
        dampen.ExplicitDropout, query_key=0.3, form="exact", shared_mask=True
    ),
    **{f"attended_{form}": make for form, make in ATTENDED.items()},
    "arora_all": partial(dampen.AroraDropout, query=0.1, key=0.1, value=0.1, ffn=0.1),
    "explicit_mixout_detached": partial(dampen.ExplicitMixout, detach_inputs=True),
    "entropy_all": partial(dampen.AttentionEntropy, 1.0, floor=1.0),
    "drop_connect_all": partial(dampen.DropConnect, 0.3, targets="all"),
    "projection_dropout_all": partial(
        dampen.ProjectionDropout, 0.3, targets=["q", "k", "v", "qkv", "kv", "out"]
    ),
    "drop_attention_plain": partial(dampen.DropAttention, 0.3, normalized=False),
    "drop_attention_columns": partial(dampen.DropAttention, 0.3, unit="column", normalized=False),
    "drop_key_columns": partial(dampen.DropKey, 0.3, unit="column"),
    "hard_masking_zero": partial(dampen.HardMasking, 0.3, fill="zero"),
    "hard_masking_learned": partial(dampen.HardMasking, 0.3, learn=["rate", "top"]),
    "blur_learned": partial(dampen.BlurredAttention, learn=True),
    "blur_per_head": partial(dampen.BlurredAttention, edge="zero", draw="head"),
    "drop_path_everywhere": partial(dampen.DropPath, 0.3),
}
"""The settings of the methods that act on different places or read different operands."""
CHANGE_VALUES = {"mixout", "drop_connect_all", "projection_dropout_all"}
"""attended_value reads A of the queries and keys that arrive, and V of the clean layer: a replay,
which gives all three as they arrived, cannot show both. `tests/methods/test_clean_operands.py` does.
"""


def _pairs():
    """By family on the models with masks, where `test_conformance.py` has every method beside each
    family on the ViT; every two settings on every model in `make full`."""
    settings, subjects = (SETTINGS, SUBJECTS) if FULL else (COMPANIONS, ("llama", "bert"))
    for first, second in itertools.combinations_with_replacement(settings, 2):
        for subject in subjects:
            yield pytest.param(
                settings[first], settings[second], subject, id=f"{first}-{second}-{subject}"
            )


@pytest.mark.parametrize(("first", "second", "subject"), list(_pairs()))
@pytest.mark.filterwarnings("ignore:HardMasking")
def test_order_and_clean_operands(first, second, subject):
    """Contracts 16 and 17 for two methods together."""
    makes = {make: name for name, make in SETTINGS.items()}
    names = {makes.get(first), makes.get(second)}
    replayed = not (names & CHANGE_VALUES and names & {f"attended_{form}" for form in ATTENDED})
    for outcome in check_pair(first, second, subject):
        if outcome.contract == "order" or replayed:
            assert outcome.state in ("kept", "refused"), str(outcome)


# --- the contracts find what they are there to find -----------------------------------------------


class Reads(dampen.Regularizer):
    """A penalty on what each head outputs, written well."""

    stochastic = False

    def __init__(self):
        super().__init__()
        self.scheduled("weight", 1.0, high=math.inf)

    def heads(self, o, call):
        self.penalize(self.weight * o.square().mean())
        return o


class ReadsWhatOthersLeft(Reads):
    """The same, but it runs among the methods that draw."""

    only_reads = False


class ReadsTheOutput(Reads):
    """Reads the output of a map after what others did to its operands."""

    roles = frozenset({"ffn_in"})
    reads_product = False

    def product(self, y, call):
        self.penalize(self.weight * y.square().mean(), "product")
        return y


class DependsOnOthers(Reads):
    """Adds less where it runs more than once in a layer."""

    def heads(self, o, call):
        seen = call.memory.setdefault("seen", [])
        seen.append(self)
        self.penalize(self.weight * o.square().mean() / len(seen))
        return o


class DrawsBesides(Reads):
    """Draws a number that it does not need, and so moves the draws of all others."""

    def heads(self, o, call):
        torch.rand(())
        return super().heads(o, call)


class WrongGradient(Reads):
    """The right value and another gradient where somebody else drops heads."""

    def heads(self, o, call):
        crowded = any(type(c).__name__ == "DropHead" for c in self.ledger.clones)
        self.penalize(self.weight * (o.detach() if crowded else o).square().mean() + 0 * o.sum())
        return o


class OrderOfCreation(dampen.Regularizer):
    """Adds the number of its clone to what it reads: given first or second, it adds another."""

    def heads(self, o, call):
        return o + 1e-3 * self.ledger.clones.index(self)


class WritesInPlace(dampen.Regularizer):
    """Changes the tensor that it got."""

    def heads(self, o, call):
        return o.mul_(2)


def test_a_penalty_that_is_written_well_keeps_both_contracts():
    for name in ("order", "beside"):
        assert check_contract(Reads, name, "vit").state == "kept"


@pytest.mark.parametrize(
    ("method", "contract", "said"),
    [
        (ReadsWhatOthersLeft, "beside", "stochastic = False"),
        (ReadsTheOutput, "beside", "the penalty reads_the_output.product together"),
        (DrawsBesides, "beside", "the output with draws_besides, which only reads, and without"),
        (WrongGradient, "beside", "the gradient of the penalties at"),
        (WritesInPlace, "shapes_and_dtypes", "heads writes into a tensor that it got"),
        (OrderOfCreation, "order", "the output in one order and in the other"),
    ],
)
def test_broken_methods_are_found(method, contract, said):
    outcome = check_contract(method, contract, "vit")
    assert outcome.state == "broken"
    assert said in outcome.message


def test_parts_that_do_not_add_up_are_found():
    outcomes = {o.contract: o for o in check_pair(DependsOnOthers, DependsOnOthers)}
    assert outcomes["order"].state == "kept"
    assert outcomes["beside"].state == "broken"
    assert "depends_on_others together" in outcomes["beside"].message


def test_an_unknown_subject():
    with pytest.raises(ValueError, match="no subject 'vitt'"):
        check_pair(Reads, Reads, "vitt")
