"""Which dropouts act, in training and in eval: each is switched off, or drawn again,
and the output compared.

Every draw depends on its place alone (`ForwardObserver.base`), so that nothing
else changes with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dampen.auditing.record import AuditedModel, DrawSite, Events, Forward, equal
from dampen.auditing.report import Audit, AuditFinding, Dropout, family
from dampen.hooks.builtin_dropout import OwnRate, find_own

TRIES = 12
"""Seeds after which a dropout without effect counts as one: layers that are skipped at random hide
what is in them."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


def examine_dropouts(s: AuditedModel, audit: Audit, seconds: float) -> None:
    """Fill in the dropouts of an audit and the findings about them.

    Args:
        s: the model.
        audit: to be filled.
        seconds: how long this may take. Beyond it, dropouts of one family are tested together.
    """
    s.prepare(True)
    rates = find_own(s.model)
    start = time.monotonic()
    trials = _Trials(s)
    base = trials.plain(0)
    once = time.monotonic() - start
    evaluated, groups = _in_eval(s)
    configured = [r for r in rates if r.original > 0]
    alone = [[r] for r in configured]
    together = len(alone) * once > seconds
    parts = list(_families(configured).values()) if together else alone
    audit.tested["dropouts"] = (
        f"each of {len(configured)} switched off{' with its family' if together else ''}, the "
        "output of a training forward compared"
    )
    rows: list[tuple[OwnRate, Dropout]] = []
    owned: set[tuple[str, float | None]] = set()
    for part in parts:
        acts, gone = trials.acts(part)
        owned |= gone
        for r in part:
            reached = _reached(s.model, r, base.record)
            why = "" if acts else _why(r, base.record)
            acting = acts if acts or reached else None
            kind = "attention dropout" if acts and _attends(base.record, gone) else r.kind
            rows.append((r, Dropout(r.name, kind, r.original, acting, False, why)))
    rows = [(r, _evaluated(r, row, evaluated, gone=owned)) for r, row in rows]
    audit.dropouts += [row for _, row in rows]
    audit.dropouts += [
        Dropout(r.name, r.kind, 0.0, False, False, "rate 0") for r in rates if r.original == 0
    ]
    functional = _functional(s, trials, base, owned | _rates_in(configured))
    audit.dropouts += [_evaluated(None, row, evaluated) for row in functional]
    known = {d.where for d in audit.dropouts if d.in_eval} | {r.place for r, d in rows if d.in_eval}
    audit.dropouts += [
        Dropout(where, "dropout", rate, False, True, "acts in eval alone")
        for where, rate, drops in evaluated
        if drops and where not in known and not any(d.where == where for d in functional)
    ]
    _find_without_effect(audit, rows, functional, base.record)
    _find_declared(s.model, audit, base.record, rates)
    _find_in_eval(s.model, audit, evaluated, groups)


class _Trials:
    """Training forwards that differ in one thing, and what they are compared with."""

    def __init__(self, s: AuditedModel) -> None:
        self.s = s
        self.known: dict[tuple[int, bool], Forward] = {}

    def plain(self, base: int, lively: bool = False) -> Forward:
        """A training forward under a seed.

        Args:
            base: the seed.
            lively: parameters that are zero get small numbers, as they have after some training. A
                branch that starts at zero hides what happens in it.
        """
        key = base, lively
        if key not in self.known:
            self.known[key] = self.s.run(True, base, light=base > 0, change=self._change(lively))
        return self.known[key]

    def acts(self, rates: Sequence[OwnRate]) -> tuple[bool, set[tuple[str, float | None]]]:
        """Whether the output changes without these rates, and the draws (module,
        rate) that are gone then.

        Args:
            rates: of dropouts.
        """
        gone: set[tuple[str, float | None]] = set()

        def off() -> None:
            for r in rates:
                # without the last layer nothing may be left to compare, without none all is
                setattr(r.module, r.attribute, 1.0 if r.kind == "layer drop" else 0.0)

        tries = list(range(TRIES))
        if not any(self._is_called(base, r) for base in range(TRIES) for r in rates):
            tries = [0, 1]  # its rate may be read all the same
        for base in tries:
            plain = self.plain(base, lively=base > 0)
            without = self.s.run(True, base, light=True, change=self._change(base > 0, off))
            gone |= set(_counted(plain.record) - _counted(without.record))
            if not equal(plain.outputs, without.outputs):
                return True, gone
        return False, gone

    def _is_called(self, base: int, r: OwnRate) -> bool:
        return r.place in self.plain(base, lively=base > 0).record.called

    def redrawn(self, where: str, rate: float | None) -> bool:
        """Whether the output changes where one module draws again.

        Args:
            where: the module.
            rate: of its draws.
        """
        for base in range(TRIES):
            plain = self.plain(base, lively=base > 0)
            mine = [d.site for d in plain.record.forward if _is(d, where, rate)]
            if not mine:
                continue
            for again in (1, 2, 3):
                other = dict.fromkeys(mine, again)
                run = self.s.run(True, base, other, light=True, change=self._change(base > 0))
                if not equal(plain.outputs, run.outputs):
                    return True
        return False

    def _change(self, lively: bool, then: Callable[[], None] | None = None) -> Callable[[], None]:
        def change() -> None:
            if lively:
                enliven(self.s)
            if then is not None:
                then()

        return change


def enliven(s: AuditedModel) -> None:
    """Small numbers for parameters that are zero, until the model is brought back.

    Args:
        s: the model.
    """
    with torch.no_grad():
        for p in s.model.parameters():
            if p.is_floating_point() and p.numel() and float(p.abs().max()) < 1e-3:
                s.kept.before_write(p)
                p.normal_(0.0, 0.02)


def _attends(record: Events, gone: set[tuple[str, float | None]]) -> bool:
    """Whether attention drew all that is gone."""
    mine = [d for d in record.forward if (d.site.module, _rounded(d.rate)) in gone]
    return bool(mine) and all(d.attention for d in mine)


def _counted(record: Events) -> Counter[tuple[str, float | None]]:
    return Counter((d.site.module, _rounded(d.rate)) for d in record.forward)


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 6)


def _is(draw: Any, where: str, rate: float | None) -> bool:
    return bool(draw.site.module == where and _rounded(draw.rate) == rate)


def _families(rates: Sequence[OwnRate]) -> dict[Any, list[OwnRate]]:
    found: dict[Any, list[OwnRate]] = {}
    for r in rates:
        found.setdefault((family(r.name), r.kind), []).append(r)
    return found


def _rates_in(rates: Sequence[OwnRate]) -> set[tuple[str, float | None]]:
    """What modules draw whose only work is to drop."""
    return {(r.place, round(r.original, 6)) for r in rates}


def _reached(model: nn.Module, r: OwnRate, record: Events) -> bool:
    """Whether the example runs the module that a dropout belongs to."""
    if r.place in record.called:
        return True
    above = r.place
    while above:
        above = above.rpartition(".")[0]
        if not isinstance(model.get_submodule(above), _LISTS):
            return above in record.called
    return "" in record.called


def _why(r: OwnRate, record: Events) -> str:
    """Why a dropout without effect has none."""
    only_drops = r.attribute in ("p", "drop_prob")
    if only_drops and r.place not in record.called:
        return "never called"
    if not record.training.get(r.place, True):
        return "in eval mode during a training forward"
    if not any(d.site.module == r.place for d in record.forward):
        return "draws nothing"
    return "its result is not used" if only_drops else "the setting changes nothing"


def _evaluated(
    r: OwnRate | None,
    row: Dropout,
    evaluated: Sequence[tuple[str, float, bool]],
    gone: set[tuple[str, float | None]] | None = None,
) -> Dropout:
    place = row.where if r is None else r.place
    acts = any(
        where == place and drops and abs(rate - row.rate) < 1e-6 for where, rate, drops in evaluated
    )
    return replace(row, in_eval=acts)


def _functional(
    s: AuditedModel, trials: _Trials, base: Forward, owned: set[tuple[str, float | None]]
) -> list[Dropout]:
    """Dropout calls in the code that no module's rate describes."""
    found: dict[tuple[str, float], bool] = {}
    for d in base.record.forward:
        rate = _rounded(d.rate)
        if rate is not None and (d.site.module, rate) not in owned:
            key = d.site.module, rate
            found[key] = found.get(key, False) or d.attention
    rows = []
    for (where, rate), attention in found.items():
        acts = trials.redrawn(where, rate)
        kind = "attention dropout" if attention else "dropout"
        why = "" if acts else "its result is not used"
        rows.append(Dropout(where, f"functional {kind}", rate, acts, False, why))
    return rows


def _in_eval(s: AuditedModel) -> tuple[list[tuple[str, float, bool]], Mapping[str, Events]]:
    """(module, rate, whether it is a dropout) of what draws in eval mode and changes the output."""
    plain = s.run(False)
    found: dict[tuple[str, float | None], list[DrawSite]] = {}
    for d in plain.record.forward:
        found.setdefault((d.site.module, _rounded(d.rate)), []).append(d.site)
    acting = []
    for (where, rate), sites in found.items():
        for again in (1, 2, 3):
            if not equal(
                plain.outputs, s.run(False, other=dict.fromkeys(sites, again), light=True).outputs
            ):
                acting.append((where, 0.0 if rate is None else rate, rate is not None))
                break
    return acting, {"eval": plain.record}


# --- findings


def _find_without_effect(
    audit: Audit,
    rows: Sequence[tuple[OwnRate, Dropout]],
    functional: Sequence[Dropout],
    record: Events,
) -> None:
    acting = [r for r, row in rows if row.in_training]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for r, row in rows:
        if row.in_training or row.in_training is None:
            continue
        instead = [o.name for o in acting if o.original == r.original and _replaces(o, r)]
        if r.kind == "drop path" and row.why == "never called":
            instead += [o.name for o in acting if o.kind == "drop path"]
        level = "note" if instead else "problem"
        groups.setdefault((row.why, level, instead[0] if instead else ""), []).append(r.name)
    for row in functional:
        if row.in_training is False:
            groups.setdefault((row.why, "problem", ""), []).append(row.where)
    for (why, level, other), names in groups.items():
        kind = "dropout_not_called" if why == "never called" else "dropout_without_effect"
        meaning, change = _CAUSES[why]
        if other:
            meaning = f"{family(other)} acts in its place; a block without a residual has no path to drop."
            change = "nothing to do"
        audit.findings.append(
            AuditFinding(kind, level, tuple(names), f"dropout: {why}", meaning, change)
        )
    missed = [r.name for r, row in rows if row.in_training is None]
    if missed:
        audit.findings.append(
            AuditFinding(
                "dropout_not_called", "note", tuple(missed), "not reached by this example",
                "The module around it did not run, so nothing is known about it.",
                "pass an example that runs it",
            )
        )  # fmt: skip


def _replaces(o: OwnRate, r: OwnRate) -> bool:
    """Whether a module keeps one rate twice, as a number and in a dropout module (x-transformers),
    of which it uses either."""

    def holder(rate: OwnRate) -> tuple[str, bool]:
        alone = rate.attribute in ("p", "drop_prob")
        return (rate.place.rpartition(".")[0] if alone else rate.place), alone

    (above, alone), (other, other_alone) = holder(o), holder(r)
    return above == other and alone != other_alone


_CAUSES = {
    "never called": (
        "The module around it runs without calling it: training has no dropout there.",
        "call it in forward: x = self.dropout(x); for a fused path: "
        "F.scaled_dot_product_attention(..., dropout_p=self.dropout.p if self.training else 0.0)",
    ),
    "in eval mode during a training forward": (
        "model.train() does not reach it: training has no dropout there.",
        "let train() call super().train(mode), and call .eval() on no part that should drop",
    ),
    "draws nothing": (
        "Its forward runs and returns its input: training has no dropout there.",
        "pass training=self.training, or call the dropout on the path that runs",
    ),
    "its result is not used": (
        "It draws, and the output is the same without it.",
        "assign the result: x = self.dropout(x)",
    ),
    "the setting changes nothing": (
        "The module draws, and the output is the same with this rate at 0.",
        "pass the rate where the dropout is called",
    ),
}


def _find_in_eval(
    model: nn.Module,
    audit: Audit,
    evaluated: Sequence[tuple[str, float, bool]],
    records: Mapping[str, Events],
) -> None:
    record = records["eval"]
    modules = dict(model.named_modules())
    groups: dict[tuple[str, ...], list[str]] = {}
    for where, rate, drops in evaluated:
        if not drops:
            operators = sorted(
                {d.operator for d in record.forward if d.site.module == where and d.rate is None}
            )
            groups.setdefault(("eval_random", ", ".join(operators), ""), []).append(where)
            continue
        mine = [d for d in record.forward if _is(d, where, round(rate, 6))]
        if record.training.get(where, False):
            cause = "stays in train mode after model.eval()"
            change = "let train() call super().train(mode); call model.eval() after every .train()"
        elif any(d.attention for d in mine):
            cause = "attention dropout that does not look at the mode"
            change = "dropout_p=self.dropout_p if self.training else 0.0"
        elif _hides_modules(modules[where]):
            cause = "a dropout in a Python list or dict, which model.eval() does not reach"
            change = "use nn.ModuleList or nn.ModuleDict instead of a list or dict"
        else:
            cause = "a functional dropout that does not look at the mode"
            change = "F.dropout(x, p, training=self.training)"
        groups.setdefault(("eval_dropout", f"rate {rate:.3g}: {cause}", change), []).append(where)
    for (kind, text, change), names in groups.items():
        if kind == "eval_dropout":
            what, meaning = (
                f"drops in eval mode, {text}",
                "Two calls with one input give two results, and metrics are too low.",
            )
        else:
            what = f"{text} changes the output in eval mode"
            meaning = "Two calls with one input give two results. A sampler means to do this."
            change = "draw only in training: if self.training; or pass ignore=['eval_random']"
        audit.findings.append(AuditFinding(kind, "problem", tuple(names), what, meaning, change))


def _hides_modules(module: nn.Module) -> bool:
    """Whether a module keeps others without listing its children."""
    children = set(map(id, module.modules()))
    for value in vars(module).values():
        values = value if isinstance(value, list | tuple) else []
        if isinstance(value, dict):
            values = list(value.values())
        if any(isinstance(v, nn.Module) and id(v) not in children for v in values):
            return True
    return False


def declared_rates(model: nn.Module, known: Sequence[OwnRate]) -> list[tuple[str, str, float]]:
    """(name, kind, rate) of each drop rate above 0 that a configuration, or a module for the
    record, declares.

    Args:
        model: any model.
        known: the rates that modules use themselves.
    """
    used = {(id(r.module), r.attribute) for r in known}
    found: dict[tuple[int, str], tuple[str, str, float]] = {}
    for place, module in model.named_modules():
        holders: list[tuple[str, Any]] = [(place, module)]
        for name in ("config", "cfg", "args", "hparams"):
            if name in vars(module):
                holders.append((f"{place}.{name}".lstrip("."), vars(module)[name]))
        for where, holder in holders:
            values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
            for name, value in list(values.items()):
                if not isinstance(name, str) or "drop" not in name.lower():
                    continue
                is_rate = isinstance(value, float) and 0 < value < 1
                if is_rate and (id(holder), name) not in used:
                    kind = _declared_kind(name)
                    found.setdefault(
                        (id(holder), name), (f"{where}.{name}".lstrip("."), kind, value)
                    )
    return list(found.values())


def _declared_kind(name: str) -> str:
    low = name.lower()
    if "path" in low or "stochastic" in low:
        return "drop path"
    return "attention dropout" if "att" in low else "dropout"


def _find_declared(
    model: nn.Module, audit: Audit, record: Events, rates: Sequence[OwnRate]
) -> None:
    """Findings about rates that are declared, or configured as 0."""
    acting = {d.kind.removeprefix("functional ") for d in audit.dropouts if d.in_training}
    for name, kind, rate in declared_rates(model, rates):
        # a library may call any of its dropouts by another name
        if kind in acting or (kind != "drop path" and acting):
            continue
        audit.findings.append(
            AuditFinding(
                "declared_rate", "problem", (name,),
                f"declares {kind} {rate:.3g}, and no {kind} acts in training",
                "The model was built without it, or it was set to 0 later.",
                f"pass the rate when the model is built, or: "
                f"dampen.regularize(model, ...).set_builtin_dropout({rate:.3g})",
            )
        )  # fmt: skip
    if rates and not any(r.original > 0 for r in rates) and not acting:
        audit.findings.append(
            AuditFinding(
                "zero_rates", "note", tuple(r.name for r in rates),
                f"all {len(rates)} rates are 0", "Nothing is dropped in training.",
                "pass the rate when the model is built, or: reg = dampen.regularize(model, ...); "
                "reg.set_builtin_dropout(0.1)",
            )
        )  # fmt: skip
