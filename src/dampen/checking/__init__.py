"""The contracts that every regularizer keeps, for the methods of this package and for yours.

>>> import dampen
>>> from dampen.checking import check_regularizer
>>> chosen = ["eval_exact", "remove"]
>>> outcomes = check_regularizer(dampen.DropKey, subjects=["vit"], contracts=chosen)
>>> [str(o) for o in outcomes]
['eval_exact on vit: kept', 'remove on vit: kept']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dampen.checking.contracts import CONTRACTS, ONCE
from dampen.checking.pairs import PAIR_CONTRACTS
from dampen.checking.subjects import (
    SUBJECTS,
    ContractBroken,
    Subject,
    subject_for,
    with_example,
)
from dampen.hooks.model import blame
from dampen.regularizer import Regularizer, UnsupportedModel

__all__ = [
    "CONTRACTS",
    "SUBJECTS",
    "ContractBroken",
    "Outcome",
    "Subject",
    "check_contract",
    "check_pair",
    "check_regularizer",
]


@dataclass(frozen=True)
class Outcome:
    """One contract on one model: kept, broken, refused by the method, or skipped, each with the
    reason."""

    contract: str
    subject: str
    state: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.contract} on {self.subject}: {self.state}" + (
            f" ({self.message})" if self.message else ""
        )


def check_regularizer(
    make: Callable[[], Regularizer],
    subjects: Sequence[str] | None = None,
    contracts: Sequence[str] | None = None,
    *,
    progress: bool | None = None,
) -> list[Outcome]:
    """Run the contracts on a regularizer, in all models; raise `ContractBroken` with every one that
    it breaks.

    Args:
        make: the class, or anything that makes a fresh regularizer without arguments.
        subjects: names among `SUBJECTS`: vit (own), timm_vit, llama (causal), bert (padded). All by
            default; those whose library is not installed are skipped, and the outcome says so.
        contracts: names among `CONTRACTS`. All by default.
        progress: a line on standard error per contract; by default where that is a terminal.
    """
    chosen = list(subjects or SUBJECTS)
    pairs = [
        (c, s) for c in contracts or CONTRACTS for s in chosen if c not in ONCE or s == chosen[0]
    ]
    shown = sys.stderr.isatty() if progress is None else progress
    outcomes = []
    for i, (contract, subject) in enumerate(pairs):
        outcomes.append(check_contract(make, contract, subject))
        if shown:
            print(f"[{i + 1}/{len(pairs)}] {outcomes[-1]}", file=sys.stderr, flush=True)
    broken = [str(o) for o in outcomes if o.state == "broken"]
    if broken:
        kept = sum(o.state == "kept" for o in outcomes)
        raise ContractBroken("\n".join([f"{len(broken)} contracts broken, {kept} kept:", *broken]))
    return outcomes


def check_contract(make: Callable[[], Regularizer], contract: str, subject: str) -> Outcome:
    """One contract on one model. Whatever a method raises breaks the contract: the outcome names
    its stage and site.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        contract: a name in `CONTRACTS`.
        subject: the model to try it on.
    """
    for kind, name, known in (("contract", contract, CONTRACTS), ("subject", subject, SUBJECTS)):
        if name not in known:
            raise ValueError(f"there is no {kind} {name!r}. Known: {', '.join(known)}.")
    return _outcome(
        contract,
        subject,
        lambda: CONTRACTS[contract](with_example(make), subject_for(make, SUBJECTS[subject])),
    )


def check_pair(
    first: Callable[[], Regularizer], second: Callable[[], Regularizer], subject: str = "vit"
) -> list[Outcome]:
    """The contracts of two methods side by side: their order does not matter (order), and each
    penalty and its gradients are what they are alone on the same layer inputs (beside).

    Args:
        first: the class, or anything that makes a fresh regularizer without arguments.
        second: the same.
        subject: a name among `SUBJECTS`.

    >>> import dampen
    >>> [str(o) for o in check_pair(dampen.DropHead, dampen.HeadDiversity)]
    ['order on vit: kept', 'beside on vit: kept']
    """
    if subject not in SUBJECTS:
        raise ValueError(f"there is no subject {subject!r}. Known: {', '.join(SUBJECTS)}.")

    def outcome(name: str) -> Outcome:
        check = PAIR_CONTRACTS[name]
        return _outcome(
            name,
            subject,
            lambda: check(
                with_example(first),
                with_example(second),
                subject_for([first, second], SUBJECTS[subject]),
            ),
        )

    return [outcome(name) for name in PAIR_CONTRACTS]


def _outcome(contract: str, subject: str, check: Callable[[], None]) -> Outcome:
    """Run one check; whatever it raises breaks the contract."""
    missing = SUBJECTS[subject].missing()
    if missing:
        return Outcome(contract, subject, "skipped", f"{missing} is not installed")
    try:
        check()
    except UnsupportedModel as refusal:
        return Outcome(contract, subject, "refused", str(refusal))
    except ContractBroken as error:
        return Outcome(contract, subject, "broken", str(error))
    except (
        Exception
    ) as error:  # of a stranger's method: any of them means that the contract is not kept
        where = blame(error)
        return Outcome(
            contract,
            subject,
            "broken",
            f"{where + ': ' if where else ''}{type(error).__name__}: {error}",
        )
    return Outcome(contract, subject, "kept")
