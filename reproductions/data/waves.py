"""Read WAV and AU files, the two formats in which the audio sets come, as mono float32 samples in
-1 to 1.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dampen.studies.plugins import DamagedData, damaged, read_file

LOWEST, HIGHEST = 1_000, 768_000  # Hz; beyond lies no recording of speech or music
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
# What writers put as size when they could not go back: the data run to the end of the file
UNKNOWN = 0xFFFFFFFF
AU_KINDS = {
    2: ("int", 8),
    3: ("int", 16),
    4: ("int", 24),
    5: ("int", 32),
    6: ("float", 32),
    7: ("float", 64),
}


def read_audio(path: Path) -> tuple[np.ndarray, int]:
    """Samples (mean over channels) and their rate in Hz, from a .wav or .au file; the content
    decides which.
    """
    content = read_file(path)
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        wave, rate = _wav(content, path)
    elif content[:4] == b".snd":
        wave, rate = _au(content, path)
    else:
        raise damaged(path, "as first bytes", content[:12], "RIFF....WAVE or .snd")
    if not LOWEST <= rate <= HIGHEST:  # resampled from 1 Hz, a small file would become a huge one
        raise damaged(path, "samples per second", rate, f"{LOWEST} to {HIGHEST}")
    return wave, rate


def _wav(content: bytes, path: Path) -> tuple[np.ndarray, int]:
    """RIFF chunks: `fmt ` says how samples are written, `data` holds them; others are skipped."""
    at, form = 12, None
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        body = at + 8
        if name == b"fmt ":
            if size < 16 or body + size > len(content):
                raise damaged(path, "bytes of fmt chunk", len(content) - body, max(size, 16))
            form = struct.unpack_from("<HHIIHH", content, body)
            if form[0] == EXTENSIBLE and size >= 26:  # the first two bytes of the sub-format's GUID
                form = (struct.unpack_from("<H", content, body + 24)[0], *form[1:])
        elif name == b"data":
            if form is None:
                raise damaged(path, "chunk first", "data", "fmt")
            size = len(content) - body if size == UNKNOWN else size
            if body + size > len(content):
                raise damaged(path, "bytes", len(content), body + size)
            tag, channels, rate, _, _, bits = form
            if tag not in (PCM, FLOAT):
                raise DamagedData(
                    f"{path} is compressed (format tag {tag}): only PCM and float WAV files are "
                    "read."
                )
            kind = "float" if tag == FLOAT else "unsigned" if bits == 8 else "int"
            return _mono(content[body : body + size], kind, bits, "<", channels, path), rate
        at = body + size + size % 2
    raise damaged(path, "bytes without a data chunk", len(content), "one")


def _au(content: bytes, path: Path) -> tuple[np.ndarray, int]:
    """Sun audio: six big-endian words (magic, offset, size, encoding, rate, channels), a note, the
    samples.
    """
    if len(content) < 24:
        raise damaged(path, "bytes", len(content), "at least 24")
    _, offset, size, encoding, rate, channels = struct.unpack_from(">4s5I", content)
    if encoding not in AU_KINDS:
        raise DamagedData(
            f"{path} has AU encoding {encoding}: only linear PCM and float (2 to 7) are read."
        )
    size = len(content) - offset if size == UNKNOWN else size
    if offset < 24 or offset + size > len(content):
        raise damaged(path, "bytes", len(content), offset + size)
    kind, bits = AU_KINDS[encoding]
    return _mono(content[offset : offset + size], kind, bits, ">", channels, path), rate


def _mono(data: bytes, kind: str, bits: int, order: str, channels: int, path: Path) -> np.ndarray:
    """Bytes to float32 in -1 to 1, averaged over channels."""
    width = bits // 8
    if channels < 1 or (kind, bits) not in _CODES | {("int", 24): ""}:
        raise DamagedData(
            f"{path} has {channels} channels of {bits}-bit {kind} samples, which is not read."
        )
    if not data or len(data) % (width * channels):
        raise damaged(
            path, "bytes of samples", len(data), f"a multiple of {width * channels}, more than none"
        )
    if (kind, bits) == ("int", 24):  # widen to 32 bits with a zero low byte
        triples = np.frombuffer(data, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(triples), 4), np.uint8)
        wide[:, slice(1, 4) if order == "<" else slice(0, 3)] = triples
        samples, bits = wide.reshape(-1).view(f"{order}i4"), 32
    else:
        samples = np.frombuffer(data, order + _CODES[kind, bits])
    if kind == "float":
        wave = samples.astype(np.float64)
    elif kind == "unsigned":
        wave = (samples.astype(np.float64) - 128) / 128
    else:
        wave = samples / 2.0 ** (bits - 1)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # a double may be finite and too large for a float
        out: np.ndarray = wave.reshape(-1, channels).mean(axis=1).astype(np.float32)
    if not np.isfinite(out).all():
        raise damaged(path, "samples", "infinite or undefined", "finite ones")
    return out


_CODES = {
    ("unsigned", 8): "u1",
    ("int", 8): "i1",
    ("int", 16): "i2",
    ("int", 32): "i4",
    ("float", 32): "f4",
    ("float", 64): "f8",
}
