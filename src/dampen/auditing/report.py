"""What `dampen.audit` returns: findings as data, and a short table to print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
"""Version of `Audit.to_json`; see docs/json.md."""

KINDS = {
    "dropout_not_called": "A dropout module exists and is never called.",
    "dropout_without_effect": "A dropout is configured and changes nothing in training.",
    "declared_rate": "The configuration declares a rate, and nothing drops.",
    "zero_rates": "Every dropout has rate 0.",
    "eval_dropout": "A dropout acts in eval mode.",
    "eval_random": "Something else is random in eval mode.",
    "eval_changes": "Two equal calls in eval mode differ, without random numbers.",
    "starts_in_eval": "The model was given in eval mode.",
    "checkpoint_redraws": "A checkpoint's recompute draws other numbers than its forward.",
    "repeated_draws": "Two calls draw the same numbers.",
    "ranks_draw_alike": "Two ranks draw the same numbers.",
    "samples_mix": "The output of a sample depends on the other samples.",
    "no_gradient": "A parameter gets no gradient.",
    "frozen": "Parameters are frozen.",
    "nan": "An output or a gradient is not a finite number.",
    "hidden_rows": "A query may look at no key at all.",
    "attention_kernel": "Attention does not run in a fused kernel.",
    "dropped_weights": "Attention weights are returned after dropout.",
}
"""Every kind of finding, in words."""
LEVELS = ("problem", "warning", "note")


@dataclass(frozen=True)
class AuditFinding:
    """One thing that the audit measured.

    Attributes:
        kind: one of `KINDS`.
        level: "problem" (the audit fails), "warning" or "note".
        where: names of the modules.
        what: what was measured.
        meaning: what follows from it.
        change: the line that changes it.
    """

    kind: str
    level: str
    where: tuple[str, ...]
    what: str
    meaning: str
    change: str

    def __str__(self) -> str:
        return (
            f"{self.level}: {places(self.where)}: {self.what}\n  {self.meaning}\n  -> {self.change}"
        )


@dataclass(frozen=True)
class Dropout:
    """One dropout, drop path or attention dropout, and whether it acts.

    Attributes:
        where: the module, and the attribute where that is not a matter of course.
        kind: dropout, attention dropout, drop path or layer drop.
        rate: as configured; as drawn for a functional call.
        in_training: whether it changes the output of a training forward. None: not reached.
        in_eval: whether it changes the output in eval mode.
        why: where it does not act, the reason.
    """

    where: str
    kind: str
    rate: float
    in_training: bool | None
    in_eval: bool
    why: str = ""


@dataclass
class Audit:
    """The result of `dampen.audit`. Print it for a table.

    Attributes:
        model: name of the model's class.
        dropouts: every dropout that was found, those at rate 0 included.
        findings: what is wrong, and what is worth knowing.
        facts: what was measured, by name.
        tested: how each fact was tested.
        layers: condition numbers and attention entropy, where they were requested.
    """

    model: str
    dropouts: list[Dropout] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    tested: dict[str, str] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no problem. Warnings and notes do not count."""
        return not self.problems

    @property
    def problems(self) -> list[AuditFinding]:
        return [f for f in self.findings if f.level == "problem"]

    def kinds(self, level: str | None = None) -> list[str]:
        """The kinds of findings, each once, in order.

        Args:
            level: only those of this level.
        """
        return list(dict.fromkeys(f.kind for f in self.findings if level in (None, f.level)))

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `dampen audit --json` prints it (docs/json.md)."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "ok": self.ok,
            "dropouts": [asdict(d) for d in self.dropouts],
            "findings": [{**asdict(f), "where": list(f.where)} for f in self.findings],
            "facts": self.facts,
            "tested": self.tested,
            "layers": self.layers,
            "exit_code": 0 if self.ok else 1,
        }

    def __str__(self) -> str:
        lines = [_headline(self)]
        lines += table(self.dropouts)
        width = max((len(name) for name in self.facts), default=0)
        lines += [f"{name:<{width}}  {_text(value)}" for name, value in self.facts.items()]
        lines += _layer_lines(self.layers)
        order = sorted(self.findings, key=lambda f: LEVELS.index(f.level))
        lines += ["", *map(str, order)] if order else []
        return "\n".join(lines)


def _headline(audit: Audit) -> str:
    acting = sum(d.in_training is True for d in audit.dropouts)
    configured = sum(d.rate > 0 for d in audit.dropouts)
    if not configured:
        dropouts = "nothing drops in training"
    else:
        dropouts = f"{acting} of {configured} dropouts act in training"
    n = len(audit.problems)
    found = f"{n} problem{'' if n == 1 else 's'}" if n else "no problems"
    return f"{audit.model}: {dropouts}; {found}"


def table(dropouts: Sequence[Dropout]) -> list[str]:
    """One line per family of dropouts ("blocks.*.attn_drop") with the same rate and effect.

    Args:
        dropouts: all of them.
    """
    families: dict[tuple[Any, ...], list[Dropout]] = {}
    for d in dropouts:
        if d.rate > 0:
            key = family(d.where), d.kind, d.in_training, d.in_eval
            families.setdefault(key, []).append(d)
    rows = [("where", "kind", "rate", "in training", "in eval")]
    for (_, kind, training, evaluated), found in families.items():
        low, high = min(d.rate for d in found), max(d.rate for d in found)
        rate = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        text = {True: "acts", False: "NO EFFECT", None: "not reached"}[training]
        where = places([d.where for d in found])
        rows.append((where, kind, rate, text, "ACTS" if evaluated else "off"))
    return _aligned(rows) if len(rows) > 1 else []


def family(name: str) -> str:
    """A module's name with a star for each number.

    >>> family("blocks.11.attn.drop1")
    'blocks.*.attn.drop1'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def places(names: Sequence[str], most: int = 3) -> str:
    """Names of modules for people: families once, and how many there are.

    Args:
        names: of modules.
        most: families that are named; the others are counted.

    >>> places(["blocks.0.drop", "blocks.1.drop", "head"])
    'blocks.*.drop (x2), head'
    """
    counted: dict[str, list[str]] = {}
    for name in names:
        counted.setdefault(family(name), []).append(name or "(the model)")
    shown = [f"{k} (x{len(v)})" if len(v) > 1 else v[0] for k, v in counted.items()]
    rest = [f"{len(shown) - most} more"] if len(shown) > most else []
    return ", ".join([*shown[:most], *rest])


def _layer_lines(layers: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each layer: mean ln kappa of the tokens and of the attention branch,
    and attention entropy."""
    if not layers:
        return []
    rows = [("layer", "ln kappa in", "attention", "with skip", "entropy (nats)")]
    for layer in layers:
        kappas = (layer.get(kind) for kind in ("tokens", "attention", "attention+skip"))
        cells = [f"{k['log_mean']:.2f}" if k else "-" for k in kappas]
        entropy = layer.get("attention_entropy")
        rows.append((layer["name"], *cells, "-" if entropy is None else f"{entropy:.2f}"))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return "not tested" if value is None else str(value)
