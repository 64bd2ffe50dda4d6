"""What a disk does: it loses what was not synced when the power goes, and it is full."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.subject import QUICK, Tally, judge, patience, trial, undisturbed
from dampen.studies.errors import DiskFull, LabError
from dampen.studies.processes import start
from dampen.studies.run import Run
from dampen.studies.trainer.train import run_trial


class Disk:
    """What of a folder is really on the disk: file contents at their last sync, names at their folder's last sync.

    It listens to os.fsync and os.replace of this process. `lose` leaves behind what a disk may after a power cut: a
    file that was not synced is cut or zeroed from its last synced byte on (or as it is: the cache may have reached the
    disk), a rename whose folder was not synced has happened or not.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.synced: dict[int, int] = {}  # inode -> bytes that are on the disk
        self.renames: dict[
            str, tuple[str, bytes | None]
        ] = {}  # target -> (source, what the name held before)
        self.fsync, self.replace = os.fsync, os.replace

    def listen(self, happened: Callable[[], None]) -> None:
        """From now on; `happened` is called after every sync and rename."""

        def fsync(handle: int) -> None:
            self.fsync(handle)
            found = os.fstat(handle)
            if os.path.isdir(f"/proc/self/fd/{handle}"):
                self.renames.clear()
            else:
                self.synced[found.st_ino] = found.st_size
            happened()

        def replace(source: Any, target: Any) -> None:
            before = Path(target).read_bytes() if Path(target).exists() else None
            self.replace(source, target)
            self.renames[str(target)] = (str(source), before)
            happened()

        os.fsync, os.replace = fsync, replace

    def lose(self, rng: random.Random) -> None:
        for target, (source, before) in self.renames.items():
            if rng.random() < 0.5:
                self.replace(target, source)
                if before is not None:
                    Path(target).write_bytes(before)
                    self.synced[os.stat(target).st_ino] = len(before)
        for path in self.folder.rglob("*"):
            if path.is_file():
                content, safe = path.read_bytes(), self.synced.get(path.stat().st_ino, 0)
                kept = rng.randint(min(safe, len(content)), len(content))
                zeros = bytes(len(content) - kept) if rng.random() < 0.5 else b""
                if rng.random() < 0.8:
                    path.write_bytes(content[:kept] + zeros)


def _until_the_cut(pipe: Any, spec: Run, folder: Path, seed: int) -> None:
    """A trial whose machine loses power at a random sync, rename or step."""
    rng = random.Random(seed)
    left = rng.randrange(1, 75)
    disk = Disk(folder)

    def happened(event: Any = None) -> None:
        nonlocal left
        left -= 1
        if not left:
            disk.lose(rng)
            os._exit(9)

    disk.listen(happened)
    run_trial(spec, folder, QUICK, happened)


def power_cuts(count: int, where: Path, rng: random.Random) -> Tally:
    """What was not synced is cut or zeroed, renames are undone; then the trial runs to its end."""
    tally, spec = Tally(), trial()
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(count):
        folder = where / f"cut-{turn}"
        for _ in range(rng.randint(1, 2)):
            process, _ = start(_until_the_cut, spec, folder, rng.randrange(10**9))
            process.join(300)
            tally["hangs"] += process.is_alive()
            process.kill()
            process.join()
            tally["cuts"] += process.exitcode == 9
        try:
            run_trial(spec, folder, QUICK)
        except LabError as error:
            tally["refused in words"] += 1
            print(error, flush=True)
        except Exception as error:  # counted, that is what this is for
            tally["tracebacks"] += 1
            print(repr(error), flush=True)
        judge(tally, folder, whole)
        tally["repetitions"] += 1
    return tally


def full(count: int, where: Path, rng: random.Random) -> Tally:
    """A real tmpfs that is full at a random point of a trial."""
    tally, spec = Tally(), trial()
    whole, disk = undisturbed(spec, where / "whole"), where / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        return Tally({"not possible here: a tmpfs cannot be mounted": 1})
    try:
        for turn in patience.turns(count):
            folder, ballast = disk / f"trial-{turn}", disk / "ballast"
            space = os.statvfs(disk)
            with ballast.open("wb") as file:
                taken = space.f_bavail * space.f_frsize - rng.randrange(0, 120_000)
                os.posix_fallocate(file.fileno(), 0, max(taken, 1))
            try:
                run_trial(spec, folder, QUICK)
                tally["was enough"] += 1
            except DiskFull:
                tally["said to be full"] += 1
            except Exception as error:
                tally["tracebacks"] += 1
                print(repr(error), flush=True)
            ballast.unlink()
            run_trial(spec, folder, QUICK)
            judge(tally, folder, whole)
            shutil.rmtree(folder)
            tally["repetitions"] += 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    return tally
