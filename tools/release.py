#!/usr/bin/env python3
"""Build sdist and wheel reproducibly: two builds of a commit have equal bytes.

python tools/release.py FOLDER    (needs the package `build`)

Files have the commit's time (SOURCE_DATE_EPOCH, if that is set). The wheel is built from the sdist. setuptools
writes build times into sdists, so sdists are packed again: files in order, with one time, owner and mode.
"""

import gzip
import io
import os
import pathlib
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).parent.parent
FIRST_TIME = 315532800  # 1980, the earliest time that a wheel can have


def commit_time() -> int:
    if "SOURCE_DATE_EPOCH" in os.environ:
        return int(os.environ["SOURCE_DATE_EPOCH"])
    asked = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 and asked.stdout.strip() else FIRST_TIME


def pack_again(path: pathlib.Path, time: int) -> None:
    """Replace a .tar.gz by one with the same files, without the build's time and user."""
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=time) as zipped:
        zipped.write(packed.getvalue())


def main() -> int:
    folder, time = pathlib.Path(sys.argv[1]).resolve(), commit_time()
    os.umask(0o022)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(time)}
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
        return 1
    for path in folder.glob("*.tar.gz"):
        pack_again(path, time)
    for path in sorted(folder.iterdir()):
        print(path.name, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
