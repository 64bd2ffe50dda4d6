"""Which method, stage and layer an error came from, read from its traceback: no step pays for it."""

from __future__ import annotations

from dampen.regularizer import STAGES, Regularizer


def blame(error: BaseException) -> str:
    """`DropKey.mask at 'blocks.0'` for an error raised inside a stage of a regularizer; empty for any other.

    The innermost stage counts: one regularizer may call another.
    """
    found, trace = "", error.__traceback__
    while trace is not None:
        owner, name = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_code.co_name
        if isinstance(owner, Regularizer) and name in STAGES:
            found = f"{type(owner).__name__}.{name}" + (
                f" at '{owner.site.name}'" if owner.site else ""
            )
        trace = trace.tb_next
    return found


def add_blame(error: BaseException) -> None:
    """Note on an error where it came from, once."""
    note = f"dampen: raised in {where}" if (where := blame(error)) else ""
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
