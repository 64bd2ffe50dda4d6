"""The contracts that every regularizer keeps, for the methods of this package and for yours.

>>> import dampen
>>> from dampen.checking import check_regularizer
>>> outcomes = check_regularizer(dampen.DropKey, subjects=["vit"], contracts=["eval_exact", "remove"])
>>> [str(o) for o in outcomes]
['eval_exact on vit: kept', 'remove on vit: kept']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dampen.checking.contracts import CONTRACTS, ONCE, ContractBroken
from dampen.checking.subjects import SUBJECTS, Subject
from dampen.regularizer import Regularizer, UnsupportedModel

__all__ = ["CONTRACTS", "SUBJECTS", "ContractBroken", "Outcome", "Subject", "check_contract", "check_regularizer"]


@dataclass(frozen=True)
class Outcome:
    """One contract on one model: kept, broken, or refused by the method (with its reason)."""

    contract: str
    subject: str
    state: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.contract} on {self.subject}: {self.state}" + (f" ({self.message})" if self.message else "")


def check_regularizer(
    make: Callable[[], Regularizer],
    subjects: Sequence[str] | None = None,
    contracts: Sequence[str] | None = None,
) -> list[Outcome]:
    """Run the contracts on a regularizer, in all models; raise `ContractBroken` with every one that it breaks.

    Args:
        make: the class, or anything that makes a fresh regularizer without arguments.
        subjects: names among `SUBJECTS`: vit (own), timm_vit, llama (causal), bert (padded). All by default.
        contracts: names among `CONTRACTS`. All by default.
    """
    outcomes = [
        check_contract(make, contract, subject)
        for contract in contracts or CONTRACTS
        for subject in subjects or SUBJECTS
        if contract not in ONCE or subject == next(iter(subjects or SUBJECTS))
    ]
    broken = [str(o) for o in outcomes if o.state == "broken"]
    if broken:
        raise ContractBroken("\n".join([f"{len(broken)} contracts broken:", *broken]))
    return outcomes


def check_contract(make: Callable[[], Regularizer], contract: str, subject: str) -> Outcome:
    """One contract on one model."""
    for kind, name, known in (("contract", contract, CONTRACTS), ("subject", subject, SUBJECTS)):
        if name not in known:
            raise ValueError(f"there is no {kind} {name!r}. Known: {', '.join(known)}.")
    try:
        CONTRACTS[contract](make, SUBJECTS[subject])
    except UnsupportedModel as refusal:
        return Outcome(contract, subject, "refused", str(refusal))
    except ContractBroken as error:
        return Outcome(contract, subject, "broken", str(error))
    return Outcome(contract, subject, "kept")
