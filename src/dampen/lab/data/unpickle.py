"""Read the CIFAR authors' Python pickles without running anything they might contain."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from dampen.lab.data.errors import DamagedData


def _latin1(text: Any, encoding: str = "latin1") -> bytes:
    """The one use that numpy's pickles make of codecs.encode: bytes kept as latin-1 text."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"codecs.encode with encoding {encoding!r}")
    return text.encode("latin1")


# Where numpy keeps the two functions that build arrays differs between its versions, in pickles as in the library.
_reconstruct: Any = np.array(0).__reduce__()[0]
_frombuffer: Any = np.array([0]).__reduce_ex__(5)[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    ("_codecs", "encode"): _latin1,
}


class _Restricted(pickle.Unpickler):
    """Builds numbers, strings, lists, dicts and numpy arrays; every other class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def safe_unpickle(content: bytes, where: str) -> Any:
    """Unpickle plain containers and numpy arrays; refuse everything else, naming what was asked for.

    >>> import pickle
    >>> safe_unpickle(pickle.dumps({"labels": [1, 2]}), "batch")
    {'labels': [1, 2]}
    >>> safe_unpickle(pickle.dumps(len), "batch")
    Traceback (most recent call last):
    ...
    dampen.lab.data.errors.DamagedData: batch was not read: as a pickle of arrays and lists it is damaged or unsafe \
(it asks for builtins.len). Fetch the official file again.
    """
    try:
        return _Restricted(io.BytesIO(content), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise DamagedData(
            f"{where} was not read: as a pickle of arrays and lists it is damaged or unsafe ({error}). "
            "Fetch the official file again."
        ) from error
