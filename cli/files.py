"""Files appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError


def check(target: Path, flag: str) -> None:
    """Refuse a place where nothing can be made. Raises UsageError."""
    folder = target.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{flag} {target}: {folder} is not a folder that can be written")


@contextmanager
def _beside(target: Path, flag: str) -> Iterator[Path]:
    """A folder on the target's file system, gone afterwards. Raises UsageError for what the system refuses."""
    part = target.absolute().parent / f".{target.name}.{os.getpid()}"
    try:
        part.mkdir()
        yield part
    except OSError as error:
        raise UsageError(f"{flag} {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def whole(target: Path, flag: str) -> Iterator[Path]:
    """A path to write to; what is there in the end becomes the target, unless something was raised."""
    with _beside(target, flag) as part:
        yield part / target.name
        (part / target.name).replace(target)


def write_folder(folder: Path, files: dict[str, str], flag: str) -> None:
    """All of the files, or where the folder is new or empty, none of them."""
    with _beside(folder, flag) as part:
        for name, text in files.items():
            (part / name).write_text(text, encoding="utf-8")
        if folder.exists() and any(folder.iterdir()):
            for name in files:
                (part / name).replace(folder / name)
        else:
            part.replace(folder)
