"""Names: the stages, how a class is called in the registry, and the nearest known word for a wrong
one.

No torch here, so that the command can list, show and complain without waiting for it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

STEP_STAGES = ("before_step", "after_step")
"""Around a step of the optimizer, outside the forward."""
MODEL_STAGES = ("inputs", "embeddings", "outputs", "task", "after_step")
LOSS_STAGES = ("outputs", "task")
"""Those that `reg.loss` alone can run."""
BLOCK_STAGES = ("tokens", "branch", "block")
LINEAR_STAGES = ("operands", "product")
ATTENTION_STAGES = ("qkv", "mask", "logits", "probs", "heads")
STAGES = (
    "inputs",
    "embeddings",
    "tokens",
    *LINEAR_STAGES,
    *ATTENTION_STAGES,
    "branch",
    "block",
    *LOSS_STAGES,
    *STEP_STAGES,
)
"""All of them, in the order in which the data meets them."""
MATRIX_STAGES = ("logits", "probs")
"""Those that need the N x M matrix of scores or weights, so that no fused kernel can run."""


def snake_case(name: str) -> str:
    """The registry name of a class.

    >>> snake_case("DropKey"), snake_case("RDrop"), snake_case("LoRADropout")
    ('drop_key', 'r_drop', 'lora_dropout')
    """
    name = name.replace("LoRA", "Lora")  # one word, however it is spelled
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def leave_out(name: str) -> str:
    """How to continue without one layer or attention, for the end of an error. The model itself
    cannot be left out.

    >>> leave_out("blocks.0")
    'leave it out: target_modules="!blocks.0"'
    """
    if name:
        return f'leave it out: target_modules="!{name}"'
    return "do without the method"


def printable(text: str) -> str:
    r"""Text for a terminal, in which control characters are shown and not obeyed.

    A name may come from anybody's file, and an escape sequence can move the cursor, set the title
    of the window or hide what follows.

    Args:
        text: may have several lines.

    >>> printable("\x1b[2Jplain")
    '\\x1b[2Jplain'
    """
    # Nearly every text is plain ASCII: one look instead of one for each character.
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else ascii(c)[1:-1]
        for c in text
    )


def nearest(word: object, known: Iterable[str]) -> str:
    """'; did you mean X?', or else what is known.

    >>> nearest("learning_rte", ["learning_rate", "epochs"])
    "; did you mean 'learning_rate'?"
    >>> nearest("zzz", ["lr", "epochs"])
    '; known: epochs, lr'
    """
    words = list(known)
    close = difflib.get_close_matches(str(word), words, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(words))}"


def close_names(word: str, known: Iterable[str], most: int = 5) -> str:
    """The names most like a wrong one, for lists that are too long to print.

    >>> close_names("vit_tinny", ["vit_tiny", "vit_base", "resnet18"], 2)
    'The closest names: vit_tiny, vit_base.'

    Args:
        word: the wrong name.
        known: all names.
        most: how many to suggest.
    """
    close = difflib.get_close_matches(word, list(known), n=most, cutoff=0.0)
    return f"The closest names: {', '.join(close)}."


def check_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` whose error for a wrong keyword names the nearest right one.

    Args:
        init: the `__init__` of a class.
    """
    parameters = inspect.signature(init).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return init

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in parameters:
                known = [p for p in parameters if p != "self"]
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}{nearest(name, known)}"
                )
        init(self, *args, **kwargs)

    return checked


def moved_out(module: str, name: str, folder: str, moved: Mapping[str, str]) -> NoReturn:
    """Raise for an attribute that a module does not have, or no longer has: the `__getattr__` of
    that module.

    Args:
        module: `__name__` of the module.
        name: the attribute that was requested.
        folder: the folder of `reproductions` that has what moved.
        moved: the attributes that moved, each with its module in that folder.
    """
    if name not in moved:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # ImportError, because `from dampen.models import DETR` would replace the message of an
    # AttributeError.
    raise ImportError(
        f"{module}.{name} moved out of the installed package. In a clone of dampen's repository, "
        "write: "
        f"from reproductions.{folder}.{moved[name]} import {name}",
        name=f"{module}.{name}",
    )
