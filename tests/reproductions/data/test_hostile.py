"""Files that are cut, changed, too large or no files at all: data errors that name the file, for every reader."""

import gzip
import json
import os
import random
import re
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image

from dampen.studies.data import load
from dampen.studies.data.dataset import DamagedData, IncompleteData, MissingData
from dampen.studies.data.files import parse_npy, read_file, read_image, read_npz
from dampen.studies.errors import Interrupted
from dampen.studies.trainer.data import _load
from dampen.studies.trainer.train import run_trial
from reproductions.data.archives import parse_json
from reproductions.data.waves import read_audio
from tests.reproductions.data import writers
from tests.reproductions.data.readers import READERS, files, read
from tests.studies.interrupted import interrupt_at

REFUSED = (DamagedData, IncompleteData, MissingData)


@pytest.mark.parametrize("case", READERS)
def test_cut_and_flipped_files_are_data_errors(tmp_path, case):
    READERS[case][1](tmp_path)
    read(case, tmp_path)
    rng = random.Random(case)
    refused = 0
    for turn in range(24):
        path = rng.choice(files(tmp_path))
        whole = path.read_bytes()
        if turn % 2:
            path.write_bytes(whole[: rng.randrange(len(whole))])
        else:
            harmed = bytearray(whole)
            for _ in range(rng.choice((1, 3, 30))):
                harmed[rng.randrange(min(len(harmed), rng.choice((64, 10**9))))] = rng.randrange(
                    256
                )
            path.write_bytes(harmed)
        try:
            read(case, tmp_path)
        except REFUSED as error:
            refused += 1
            assert str(tmp_path) in str(error) or "incomplete" in str(error)  # noqa: PT017
        path.write_bytes(whole)
    assert refused or case in (
        "text",
        "gtzan audio",
    )  # other letters are text; unreadable clips of a partial copy left out


def change(path):
    """Another content that is as valid as the old one."""
    if path.suffix in (".png", ".jpg"):
        Image.new("RGB", (44, 44), (1, 2, 3)).save(path)
    elif path.suffix == ".npz":
        with np.load(path) as table:
            arrays = {name: table[name] for name in table.files}
        key = "mel" if "mel" in arrays else "x"
        np.savez(path, **{**arrays, key: arrays[key] + 1})
    elif path.suffix == ".npy":
        np.save(path, np.load(path) + 1)
    elif path.suffix == ".gz" and b"\n" in gzip.decompress(path.read_bytes())[:200]:
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"e", b"a")))
    elif path.suffix in (".en", ".de", ".txt"):
        path.write_bytes(path.read_bytes().replace(b"e", b"a"))
    elif path.suffix in (".csv", ".jsonl"):
        path.write_bytes(path.read_bytes().replace(b"word", b"ward"))
    else:  # raw pixels and samples
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)


def victim(folder):
    """A file whose content is data: not labels, names or annotations."""
    skipped = ("annotations.json", "batches.meta", "batches.meta.txt", "meta")
    found = (
        p for p in files(folder) if p.name not in skipped and p.parent.name != "Main"
    )  # there VOC has its lists
    return next(p for p in found if not p.name.endswith((".json", ".xml", "names.txt")))


def known_by(dataset):
    """What a checkpoint remembers of its data, and compares when it resumes."""
    sums = dataset.info["sha256"]
    assert sums
    return sums


@pytest.mark.parametrize(
    "case", [c for c in READERS if "tar" not in c and "python" not in c and "mosaic" not in c]
)
def test_data_that_changed_are_known_to_be_others(tmp_path, case):
    READERS[case][1](tmp_path)
    before = known_by(read(case, tmp_path))
    assert known_by(read(case, tmp_path)) == before
    change(victim(tmp_path))
    assert known_by(read(case, tmp_path)) != before


@pytest.mark.parametrize(
    "case", ["cifar10 python", "cifar10 mosaic", "cifar10 tar.gz", "cifar100 python"]
)
def test_packed_layouts_are_known_by_their_pixels(tmp_path, case):
    READERS[case][1](tmp_path)
    before = known_by(read(case, tmp_path))
    parts = writers.cifar10_parts(21)
    train, test = (writers.cifar_rows(200, 100, seed, coarse=True) for seed in (5, 6))
    other = tmp_path / "other"
    if case == "cifar100 python":
        writers.cifar100_python(other, train, test)
    else:
        writers.cifar10_binary(other, parts)
    assert known_by(read(case, other)) != before


def test_a_trial_does_not_resume_on_other_data(tmp_path, small, quick):
    from dampen.studies.run import Run

    data = writers.image_folder(tmp_path / "images", n=20)
    execution = quick.__class__(**{**quick.__dict__, "data_dir": str(data)})
    base = small(epochs=3, batch_size=8).to_dict()
    trial = Run.from_dict({**base, "data": {"name": "folder", "size": 8}})
    report, stop = interrupt_at({4})
    with pytest.raises(Interrupted):
        run_trial(trial, tmp_path / "run", execution, report, stop)
    Image.new("RGB", (44, 44), (1, 2, 3)).save(data / "cat" / "0.png")
    _load.cache_clear()
    with pytest.raises(
        DamagedData, match=r"has changed since the checkpoint was written.*Put the data back"
    ):
        run_trial(trial, tmp_path / "run", execution)
    _load.cache_clear()


def test_pipes_and_devices_are_not_opened(tmp_path):
    folder = writers.image_folder(tmp_path / "images")
    os.mkfifo(folder / "cat" / "0a.png")  # opening it would wait for ever
    with pytest.raises(DamagedData, match=r"0a\.png is no regular file \(prw"):
        read("folder of png", tmp_path / "images")
    with pytest.raises(DamagedData, match="no regular file"):
        read_file(type(tmp_path)("/dev/zero"))


def test_claims_beyond_a_limit_name_it_and_can_be_raised(tmp_path, monkeypatch):
    path = tmp_path / "train.en.gz"
    bomb = gzip.compress(bytes(10_000_000))
    monkeypatch.setenv("DAMPEN_MAX_CONTENT", "1000000")
    writers.parallel(tmp_path)
    (tmp_path / "train.en").unlink()
    path.write_bytes(bomb)
    with pytest.raises(
        DamagedData,
        match=r"train\.en\.gz claims 1000001 bytes.*limit of 1000000.*DAMPEN_MAX_CONTENT=",
    ):
        read("parallel gz", tmp_path)
    monkeypatch.setenv("DAMPEN_MAX_CONTENT", "20000000")
    with pytest.raises(
        DamagedData, match=r"claims 10000000 characters in one line.*DAMPEN_MAX_LINE"
    ):
        read("parallel gz", tmp_path)


def test_a_tar_member_a_png_and_an_array_cannot_claim_gigabytes(tmp_path, monkeypatch):
    READERS["cifar10 tar.gz"][1](tmp_path)
    monkeypatch.setenv("DAMPEN_MAX_CONTENT", "50000")
    with pytest.raises(
        DamagedData, match=r"data_batch_1\.bin\) claims 61460 bytes.*DAMPEN_MAX_CONTENT"
    ):
        read("cifar10 tar.gz", tmp_path)
    monkeypatch.setenv("DAMPEN_MAX_PIXELS", "1000")
    picture = tmp_path / "a.png"
    Image.new("RGB", (40, 40)).save(picture)
    with pytest.raises(DamagedData, match="claims 1600 pixels.*DAMPEN_MAX_PIXELS"):
        read_image(picture, picture.read_bytes(), ("PNG",), "RGB")
    array = bytearray(_npy(np.zeros((3, 4), np.float32)))
    claimed = array.replace(b"(3, 4)", b"(3, 4" + b"0" * 9 + b")").replace(b" " * 9 + b"\n", b"\n")
    with pytest.raises(DamagedData, match="has 48 of 48000000000 bytes"):
        parse_npy(bytes(claimed), "x.npy")


def _npy(array):
    import io

    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("old", "new"), [(b"}", b"{"), (b"'descr'", b'"""des\''), (b"(3, 4)", b"(3, 4 ")]
)
def test_headers_of_arrays_that_are_no_literals_are_refused(old, new):
    """The first two were a TokenError: numpy tries them as headers of Python 2."""
    with pytest.raises(DamagedData, match=r"x\.npy .*damaged or truncated"):
        parse_npy(_npy(np.zeros((3, 4), np.float32)).replace(old, new), "x.npy")


@pytest.mark.parametrize(
    "array", [np.array([1j]), np.array(["a"]), np.array([1], "M8[s]"), np.zeros(1, [("a", "f4")])]
)
def test_arrays_of_other_kinds_are_refused(array):
    with pytest.raises(DamagedData, match="which is not read"):
        parse_npy(_npy(array), "x.npy")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"annotations": ' * 3, "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"annotations": []}', "one entry per video"),
    ],
)
def test_odd_annotations(tmp_path, content, why):
    writers.thumos(tmp_path)
    (tmp_path / "annotations.json").write_text(content)
    with pytest.raises(DamagedData, match=rf"annotations\.json.*{why}"):
        read("thumos14", tmp_path)


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        ([-2, -1.5], None),
        ([3, 2], None),
        (["a", 1], None),
        ([0, float("inf")], None),
        (None, "../../x"),
    ],
)
def test_segments_before_the_video_and_names_outside_the_folder_are_refused(
    tmp_path, segment, name
):
    """[-2, -1.5] once marked the last frame."""
    writers.thumos(tmp_path)
    path = tmp_path / "annotations.json"
    table = json.loads(path.read_text())
    first = next(iter(table["annotations"]))
    if segment is not None:
        table["annotations"][first]["annotations"][0]["segment"] = segment
    if name is not None:
        table["annotations"][name] = table["annotations"].pop(first)
    path.write_text(json.dumps(table))
    with pytest.raises(DamagedData, match=r"annotations\.json breaks the form"):
        read("thumos14", tmp_path)


@pytest.mark.parametrize("label", [256, -1, 10, 1.5, True, "3"])
def test_a_label_of_the_mosaic_outside_the_classes_is_refused(tmp_path, label):
    """256 once became 0."""
    folder = writers.cifar10_mosaic(tmp_path / "package", writers.cifar10_parts())
    labels = json.loads((folder / "test_lables.json").read_text())
    (folder / "test_lables.json").write_text(json.dumps([label, *labels[1:]]))
    with pytest.raises(DamagedData, match=r"test_lables\.json"):
        read("cifar10 mosaic", tmp_path)


@pytest.mark.parametrize("harm", ["negative", "float", "complex", "nan"])
def test_precomputed_spectra_with_odd_values_are_refused(tmp_path, harm):
    writers.gtzan_mel(tmp_path)
    path = tmp_path / "mel64.npz"
    with np.load(path) as table:
        arrays = {name: table[name] for name in table.files}
    if harm == "negative":
        arrays["label"] = arrays["label"].astype(np.int64) - 1
    elif harm == "float":
        arrays["label"] = arrays["label"].astype(np.float32)
    elif harm == "complex":
        arrays["mel"] = arrays["mel"].astype(np.complex64)
    else:
        arrays["mel"][0, 0, 0] = np.nan
    np.savez(path, **arrays)
    with pytest.raises(DamagedData, match=r"mel64\.npz"):
        read("gtzan mel", tmp_path)


def test_zip_files_that_lie(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mel.npy", _npy(np.zeros(1000, np.float32)))
    content = bytearray(path.read_bytes())
    for match in re.finditer(b"PK\x01\x02", content):
        struct.pack_into("<I", content, match.start() + 24, 2**32 - 2)  # what it says it holds
    path.write_bytes(content)
    with pytest.raises(DamagedData, match=r"claims 4294967294 bytes.*DAMPEN_MAX_CONTENT"):
        read_npz(path, {"mel": "f"})


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (np.array([[[1.0]], [[np.nan]]]), [0, 1], r"no finite number, at \[1, 0, 0\]"),
        (np.array([[[1e300]], [[1.0]]]), [0, 1], "no finite number"),  # finite as a double alone
        (np.array([[[1j]], [[2.0]]]), [0, 1], "complex128"),
        (np.array([[["a"]], [["b"]]]), [0, 1], "inputs of <U1"),
        (np.array(3.0), [0, 1], "has 0 inputs and 2 labels"),
        (np.ones((2, 1, 1)), [0.0, np.nan], "the label nan"),
        (np.ones((3, 1, 1)), [0, 1], "3 inputs and 2 labels"),
    ],
)
def test_own_arrays_with_odd_values_are_refused(tmp_path, x, y, why):
    """NaN went into training, a label of NaN became a class."""
    np.savez(tmp_path / "own.npz", x=x, y=np.array(y))
    with pytest.raises(DamagedData, match=why):
        read("feature arrays", tmp_path)


def test_own_arrays_that_are_no_archive_or_claim_too_much(tmp_path, monkeypatch):
    """The first was a BadZipFile, the second took the memory."""
    path = writers.arrays(tmp_path / "own.npz", images=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedData, match=r"own\.npz.*damaged or truncated"):
        read("image arrays", tmp_path)
    path.write_bytes(whole)
    monkeypatch.setenv("DAMPEN_MAX_CONTENT", "1000")
    with pytest.raises(DamagedData, match=r"own\.npz \(x\) claims .*DAMPEN_MAX_CONTENT="):
        read("image arrays", tmp_path)


def test_arrays_of_the_other_byte_order_are_read_the_same(tmp_path):
    path = writers.arrays(tmp_path / "own.npz", images=False)
    before = read("feature arrays", tmp_path).train.batch([0, 1])["inputs"][0]
    with np.load(path) as table:
        arrays = {name: table[name] for name in table.files}
    np.savez(path, x=np.asfortranarray(arrays["x"].astype(">f8")), y=arrays["y"].astype(">i2"))
    after = read("feature arrays", tmp_path).train.batch([0, 1])["inputs"][0]
    assert (before == after).all()


@pytest.mark.parametrize(
    "labels", [["5", "--5"], ["1", "²"], ["1", "9" * 5000], ["-3", "2", "10"], ["7", "a", "b"]]
)
def test_labels_that_look_like_numbers(tmp_path, labels):
    """The first three were tracebacks of int(). Numbers come first, by size."""
    rows = [f"word {i},{label}\n" for label in reversed(labels) for i in range(8)]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(rows))
    assert read("table of csv", tmp_path).classes == labels


def test_a_table_of_json_that_is_deep_or_long(tmp_path, monkeypatch):
    path = writers.table(tmp_path / "train.jsonl")
    whole = path.read_text()
    path.write_text(whole + "[" * 100_000 + "\n")
    with pytest.raises(DamagedData, match=r"train\.jsonl cannot be read as jsonl"):
        read("table of jsonl", tmp_path)
    monkeypatch.setenv("DAMPEN_MAX_LINE", "1000")
    with pytest.raises(
        DamagedData, match=r"train\.jsonl claims 100001 characters in one line.*DAMPEN_MAX_LINE="
    ):
        read("table of jsonl", tmp_path)


@pytest.mark.parametrize("rows", ["a,x,y\nb,x\n", "a,x\nb,x,y\n"], ids=["first row", "second row"])
def test_a_table_with_more_values_than_names(tmp_path, rows):
    """In the first row this was an AttributeError of a column without a name."""
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    with pytest.raises(
        DamagedData,
        match=r"train\.csv: row [12] has more values than the header has names, \['text'",
    ):
        read("table of csv", tmp_path)


def test_a_partial_copy_without_its_test_part_says_what_is_missing(tmp_path):
    folder = writers.cifar10_binary(tmp_path / "cifar-10-batches-bin", writers.cifar10_parts())
    (folder / "test_batch.bin").unlink()
    with pytest.raises(
        IncompleteData, match="The test split of cifar10 is empty .incomplete copy: .*test_batch"
    ):
        read("cifar10 binary", tmp_path)


def test_a_split_of_gtzan_that_is_no_text(tmp_path):
    """This was a UnicodeDecodeError without the file's name."""
    READERS["gtzan audio"][1](tmp_path)
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}_filtered.txt").write_bytes(b"blues/blues.00000.au\n\xff\n")
    with pytest.raises(DamagedData, match=r"train_filtered\.txt cannot be read as UTF-8"):
        read("gtzan audio", tmp_path)


def test_a_pipe_in_a_folder_of_tables_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "train.csv")
    with pytest.raises(DamagedData, match=r"train\.csv is no regular file"):
        read("table of csv", tmp_path)


def test_saved_sets_that_are_damaged_or_hold_other_formats(tmp_path):
    import datasets

    pictures = []
    for i, kind in enumerate(["PNG"] * 11 + ["TIFF"]):
        Image.new("RGB", (9, 8), (20 * i, 0, 0)).save(tmp_path / f"{i}.{kind.lower()}", kind)
        pictures.append({"bytes": (tmp_path / f"{i}.{kind.lower()}").read_bytes(), "path": None})
    columns = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    for name, rows in {"good": pictures[:10], "tiff": pictures[2:]}.items():
        made = datasets.Dataset.from_dict(
            {"image": rows, "label": [i % 2 for i in range(10)]}, features=columns
        )
        made.save_to_disk(str(tmp_path / name))
    options = {"size": 8, "train_fraction": 0.5}
    assert load("hub_images", tmp_path / "good", **options).model_args["channels"] == 3
    with pytest.raises(DamagedData, match=r"tiff, row 10 is damaged .* or no PNG"):
        load("hub_images", tmp_path / "tiff", **options)
    arrow = next((tmp_path / "good").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:200])
    with pytest.raises(DamagedData, match=r"good is damaged or truncated"):
        load("hub_images", tmp_path / "good", **options)
    arrow.unlink()
    os.mkfifo(arrow)
    with pytest.raises(DamagedData, match=r"arrow is no regular file"):
        load("hub_images", tmp_path / "good", **options)


def test_a_sound_of_doubles_too_large_for_floats_is_refused(tmp_path):
    """1e300 is a finite double: it became an infinite sample."""
    head = struct.pack(">4s5I", b".snd", 24, 16, 7, 8000, 1)
    (tmp_path / "a.au").write_bytes(head + struct.pack(">2d", 0.5, 1e300))
    with pytest.raises(DamagedData, match="infinite or undefined"):
        read_audio(tmp_path / "a.au")


@pytest.mark.parametrize("rate", [0, 1, 2**31])
def test_impossible_sampling_rates_are_refused(tmp_path, rate):
    path = writers.au(tmp_path / "a.au", writers.tone(440, 0.1, 8000), rate)
    with pytest.raises(DamagedData, match=f"got {rate} samples per second"):
        read_audio(path)


def test_only_the_formats_that_are_named_are_decoded(tmp_path):
    path = tmp_path / "cat.png"
    Image.new("RGB", (4, 4)).save(path, "TIFF")
    with pytest.raises(DamagedData, match="no PNG"):
        read_image(path, path.read_bytes(), ("PNG",), "RGB")


def test_json_names_its_file(tmp_path):
    with pytest.raises(DamagedData, match="x.json"):
        parse_json(b"\xff\xfe", tmp_path / "x.json")
