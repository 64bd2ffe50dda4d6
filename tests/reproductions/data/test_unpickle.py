"""Pickles are read as data: what the authors' files hold comes out, and no file can call, crash or swell anything."""

import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dampen.studies.data.dataset import DamagedData
from reproductions.data.unpickle import safe_unpickle


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def long(content: bytes) -> bytes:
    return b"T" + len(content).to_bytes(4, "little") + content


def python2_batch(labels: list[int], rows: np.ndarray) -> bytes:
    """A batch as Python 2's cPickle wrote it with protocol 2, instruction by instruction."""
    n, width = rows.shape
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    kind = b"cnumpy\ndtype\nq\x0a" + short(b"u1") + b"K\x00K\x01\x87q\x0bRq\x0c"
    kind += b"(K\x03" + short(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    shape = b"K" + bytes([n]) + b"M" + width.to_bytes(2, "little") + b"\x86q\x0d"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85"
        + short(b"b")
        + b"\x87Rq\x09"
    )
    array += b"(K\x01" + shape + kind + b"\x89" + long(rows.tobytes()) + b"tb"
    return (
        b"\x80\x02}q\x01(" + short(b"batch_label") + short(b"training batch 1 of 5") + short(b"labels") + b"]q\x02("
        + numbers + b"e" + short(b"data") + array + b"u."
    )  # fmt: skip


def test_a_python_2_batch_is_read():
    rows = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    content = python2_batch([3, 1, 9], rows)
    expected = pickle.loads(
        content, encoding="bytes"
    )  # the oracle: pickle's own machine, on a file we wrote
    table = safe_unpickle(content, "data_batch_1")
    assert table[b"labels"] == expected[b"labels"] == [3, 1, 9]
    np.testing.assert_array_equal(table[b"data"], rows)
    np.testing.assert_array_equal(expected[b"data"], rows)


scalars = st.integers(-(2**70), 2**70) | st.binary(max_size=20) | st.text(max_size=20)
arrays = st.builds(
    lambda code, n: np.arange(n * 3).astype(code).reshape(n, 3),
    st.sampled_from(["u1", "i1", "<u2", ">i2", "<i4", ">u4", "<i8", ">u8"]),
    st.integers(1, 4),
)
tables = st.dictionaries(
    st.binary(min_size=1, max_size=8) | st.text(max_size=8),
    scalars.filter(lambda v: v != b"")
    | st.lists(scalars.filter(lambda v: v != b""), max_size=5)
    | arrays,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(tables, st.integers(0, 5))
def test_what_pickle_reads_of_such_tables_is_read_the_same(table, protocol):
    content = pickle.dumps(table, protocol=protocol)
    read, expected = safe_unpickle(content, "x"), pickle.loads(content)
    assert read.keys() == expected.keys()
    for key, value in expected.items():
        assert type(read[key]) is type(value)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(read[key], value)
        else:
            assert read[key] == value


DTYPE_O = b"cnumpy\ndtype\n(" + short(b"O8") + b"K\x00K\x01tR"
RAW = long(b"\x41" * 8)
MAKE = b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
HOSTILE = {
    "ndarray called over raw bytes": b"\x80\x02cnumpy\nndarray\n(K\x01\x85U\x01O" + RAW + b"tR.",
    "as a value of a table": b"\x80\x02}U\x04datacnumpy\nndarray\n(K\x01\x85U\x01O" + RAW + b"tRs.",
    "objects by _reconstruct": MAKE + b"K\x01\x85U\x01OtRs.",
    "objects in the state": MAKE + b"K\x00\x85U\x01btR"
    b"(K\x01K\x01\x85" + DTYPE_O + b"\x89" + RAW + b"tbs.",
    "a state for a name": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}U\x01aK\x01sb.",
    "more rows than bytes": MAKE + b"K\x00\x85U\x01btR"
    b"(K\x01J\xff\xff\xff\x7f\x85cnumpy\ndtype\n(U\x02u1K\x00K\x01tR\x89" + RAW + b"tbs.",
    "persistent ids": b"\x80\x02}U\x01aU\x01bQs.",
    "extensions": b"\x80\x02\x82\x01.",
    "new objects": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "an array without content": MAKE + b"K\x00\x85U\x01btRs.",
}  # fmt: skip


def test_hostile_files_are_refused_in_a_process_that_survives():
    """In a process of its own: the reader before this one died of the first two by SIGSEGV."""
    code = (
        "import pickle, sys; from reproductions.data.unpickle import safe_unpickle\n"
        "for name, content in pickle.load(sys.stdin.buffer).items():\n"
        "    try: print(name, repr(safe_unpickle(content, 'meta')), flush=True)\n"
        "    except ValueError as error: print(name, error, flush=True)"
    )
    given_ = pickle.dumps(HOSTILE)
    done = subprocess.run(
        [sys.executable, "-c", code], input=given_, capture_output=True, timeout=120
    )
    told = done.stdout.decode().splitlines()
    assert done.returncode == 0, (told, done.stderr[-500:])
    assert len(told) == len(HOSTILE)
    for name, line in zip(HOSTILE, told, strict=True):
        assert line.startswith(name)
        assert "damaged or unsafe" in line


def test_a_small_file_cannot_become_large():
    """Texts encoded again and again, lists of lists of one list: both refused before memory is taken."""
    text = b"X" + (100_000).to_bytes(4, "little") + b"a" * 100_000
    again = b"c_codecs\nencode\n(h\x00X\x06\x00\x00\x00latin1tRa"
    swelling = b"\x80\x02}U\x01a]" + text + b"q\x000" + again * 5000
    nested = (
        b"\x80\x02}U\x01a]q\x00"
        + b"".join(b"(" + b"h\x00" * 10 + b"lq\x00" for _ in range(20))
        + b"s."
    )
    tracemalloc.start()
    for content in (swelling, nested):
        with pytest.raises(DamagedData, match="damaged or unsafe"):
            safe_unpickle(content, "meta")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * len(swelling) + 2**20


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_and_cut_files_are_read_or_refused(data):
    content = bytearray(python2_batch([1, 2], np.arange(20, dtype=np.uint8).reshape(2, 10)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        table = safe_unpickle(bytes(content), "x")
    except DamagedData:
        return
    assert isinstance(table, dict)
