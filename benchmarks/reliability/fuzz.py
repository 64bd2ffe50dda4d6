"""Files of every format with bytes changed, each given to what takes such files apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.subject import Tally, patience


def formats(count: int, where: Path, rng: random.Random) -> Tally:
    """`count` harmed contents for each function that takes a file apart: read, or refused as damaged."""
    from dampen.studies.data.dataset import DamagedData

    tally = Tally()
    for name, (content, read) in _taken_apart(where).items():
        for _ in patience.turns(count):
            try:
                read(harmed(content, rng))
            except DamagedData:
                tally["refused in words"] += 1
            except Exception as error:
                tally["tracebacks"] += 1
                print(name, repr(error)[:300], flush=True)
            tally[f"inputs to {name}"] += 1
    tally["repetitions"] = sum(n for what, n in tally.items() if what.startswith("inputs"))
    return tally


def _taken_apart(where: Path) -> dict[str, tuple[bytes, Callable[[bytes], Any]]]:
    """Format -> (a good file, what reads such a file)."""
    import gzip
    import io
    import lzma
    import tarfile

    import numpy as np
    from PIL import Image

    from dampen.studies.data.files import parse_npy, read_image, read_npz
    from reproductions.data.archives import Store, parse_json
    from reproductions.data.unpickle import safe_unpickle
    from reproductions.data.waves import read_audio
    from tests.reproductions.data import writers
    from tests.reproductions.data.test_unpickle import python2_batch

    def in_memory(save: Callable[[Any], Any]) -> bytes:
        buffer = io.BytesIO()
        save(buffer)
        return buffer.getvalue()

    def from_disk(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
        def one(content: bytes) -> Any:
            (where / name).write_bytes(content)
            return read(where / name)

        return one

    def tar(stream: Any) -> None:
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name in ("a.bin", "b.bin"):
                member = tarfile.TarInfo(f"x/{name}")
                member.size = 700
                archive.addfile(member, io.BytesIO(bytes(range(250)) * 2 + bytes(200)))

    pixels = np.arange(30, dtype=np.uint8).reshape(3, 10)
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 255, (12, 10, 3), dtype=np.uint8)
    )
    png, jpeg = (in_memory(lambda b, f=f: picture.save(b, f)) for f in ("PNG", "JPEG"))
    packed = in_memory(tar)
    sounds = {
        k: getattr(writers, k)(where / f"good.{k}", writers.tone(440, 0.05, 8000), 8000)
        for k in ("wav", "au")
    }
    json_text = b'{"annotations": {"a": [1, 2.5, null, true, "\\u00e9"]}, "classes": ["x", "y"]}'
    image = Path("picture")
    return {
        "pickles": (python2_batch([1, 2, 3], pixels), lambda c: safe_unpickle(c, "x")),
        "npy": (in_memory(lambda b: np.save(b, array)), lambda c: parse_npy(c, "x")),
        "npz": (
            in_memory(lambda b: np.savez_compressed(b, mel=array, label=np.arange(4))),
            from_disk("harmed.npz", lambda p: read_npz(p, {"mel": "f", "label": "iu"})),
        ),
        "JSON": (json_text, lambda c: parse_json(c, image)),
        "PNG": (png, lambda c: read_image(image, c, ("PNG",), "RGB")),
        "JPEG": (jpeg, lambda c: read_image(image, c, ("JPEG",), "RGB")),
        "tar": (packed, from_disk("harmed.tar", lambda p: Store(p, {"a.bin", "b.bin"}).read)),
        "tar.gz": (gzip.compress(packed), from_disk("harmed.tar.gz", lambda p: Store(p, {"a.bin"}).read)),
        "tar.xz": (lzma.compress(packed), from_disk("harmed.tar.xz", lambda p: Store(p, {"a.bin"}).read)),
        "wav": (sounds["wav"].read_bytes(), from_disk("harmed.wav", read_audio)),
        "au": (sounds["au"].read_bytes(), from_disk("harmed.au", read_audio)),
    }  # fmt: skip


def harmed(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, at the start more often than elsewhere, cut, or with a piece repeated."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 4, 40))):
        changed[rng.randrange(min(len(changed), rng.choice((80, 2000, 10**9))))] = rng.randrange(
            256
        )
    if rng.random() < 0.1:
        place = rng.randrange(len(changed))
        changed[place:place] = changed[place : place + rng.randrange(1, 64)]
    return bytes(changed[: rng.randrange(1, len(changed) + 1)] if rng.random() < 0.3 else changed)
