"""The hidden directory in `out_dir` in which a new model is made, and from which it appears there.

A kill while the model is made leaves `out_dir` without a file. While its files appear, the hidden
one is in `CLAIM`, whose name only one export can have, and keeps a hard link of each. So the next
export can tell and remove what was begun; it takes CLAIM away first, after which the other one,
should it still live, finds no file of its own to show, and fails. An export that has shown all
gives its hidden directory a name for what is only to be removed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress

from smckpt.errors import UsageError
from smckpt.meeting.presence import has_ended, own_process
from smckpt.storage.disk.directory import Directory
from smckpt.storage.disk.linux import rename_exclusive
from smckpt.storage.disk.posix_write import link_exclusive
from smckpt.storage.faults import os_errors_at, storage_error

CLAIM = ".smckpt-export"
# of the process that made it: a name of its system, its number, and when it began
_NAME = re.compile(r"\.smckpt-export-([0-9a-f]{16})-(\d{1,20})-(\d{1,20})-[0-9a-f]{8}", re.ASCII)
_DONE = re.compile(r"\.smckpt-export-done-[0-9a-f]{8}", re.ASCII)


def is_hidden(name: str) -> bool:
    return name == CLAIM or any(kind.fullmatch(name) for kind in (_NAME, _DONE))


def clear(path: str) -> list[str]:
    """Remove what exports left that were killed. Returns the hidden directories of those that still
    run, or ran on another host or before this one started.

    Raises:
        StorageError: it cannot be removed.
    """
    try:
        with Directory.open(path) as out:
            taken = new_name()
            with suppress(FileNotFoundError):
                out.rename(CLAIM, taken)
                _discard(out, taken)
            return [n for n in out.names() if is_hidden(n) and not _discarded_if_over(out, n)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(error, path, "remove what a killed export left") from error


def begin(path: str) -> str:
    """Make the hidden directory of an export. Returns its name."""
    name = new_name()
    with (
        os_errors_at(path, "make a directory"),
        Directory.open(path, make=True) as out,
        out.make(name),
    ):
        out.sync()
    return name


def show(path: str, name: str, last: str, of_model: Callable[[str], object]) -> None:
    """Give the files of a hidden directory their names in `path`. What else is there stays.

    Args:
        last: the file with which the model can be loaded.
        of_model: whether a file of a name would be taken for a part of the model.

    Raises:
        UsageError: one of the names is taken, or a file of another model is there; or another
            export shows its own.
    """
    try:
        with Directory.open(path) as out, out.below(name) as hidden, ExitStack() as on_failure:
            inside = f"{CLAIM}/{name}"
            out.make(CLAIM).close()
            out.rename(name, inside)
            made = hidden.names()
            if others := [n for n in out.names() if n in made or of_model(n)]:
                raise _taken(out, others)
            for each in sorted(made, key=lambda n: n == last):
                if each == last:
                    out.sync()
                if not hidden.is_directory(each):
                    _show(out, inside, each, on_failure)
                    continue
                out.make(each).close()
                with hidden.below(each) as deeper:
                    for one in deeper.names():
                        _show(out, inside, f"{each}/{one}", on_failure)
            out.sync()
            done = f"{CLAIM}-done-{secrets.token_hex(4)}"
            out.rename(inside, done)  # it fails if another export has taken it away
            on_failure.pop_all()
            with suppress(OSError):
                out.remove_directory(CLAIM)
            with suppress(OSError):
                out.remove_all(done)
    except (FileNotFoundError, FileExistsError) as error:
        raise UsageError(
            "another export shows its files in this directory at the same time",
            remedy="choose another out_dir for one of them, and export again",
            path=path,
        ) from error
    except OSError as error:
        raise storage_error(error, path, "name the finished files") from error


def discard(path: str, name: str) -> None:
    """Remove a hidden directory, and what of it has appeared."""
    with suppress(OSError), Directory.open(path) as out:
        with suppress(FileNotFoundError):  # of this export, and not of another
            out.rename(f"{CLAIM}/{name}", name)
            out.remove_directory(CLAIM)
        _discard(out, name)


def _show(out: Directory, inside: str, name: str, on_failure: ExitStack) -> None:
    hidden = f"{inside}/{name}"  # a path, which ends where CLAIM is taken away
    shown = link_exclusive(out, hidden, name)
    if shown is None:  # without hard links; where the show fails, it goes back
        mine = out.status(hidden)
        shown = rename_exclusive(out.fd, hidden, name)
        if shown is None and out.status(name) is None:
            out.rename(hidden, name)
            shown = True
        if shown:
            on_failure.callback(_move_back, out, hidden, name, mine)
    if not shown:
        raise _taken(out, [name])


def _move_back(out: Directory, hidden: str, name: str, mine: os.stat_result | None) -> None:
    with suppress(OSError):
        there = out.status(name)
        if mine is not None and there is not None and os.path.samestat(mine, there):
            out.rename(name, hidden)


def _taken(out: Directory, names: list[str]) -> UsageError:
    return UsageError(
        f"the directory held no model when the export began; now it holds {names[:8]}",
        remedy="choose another out_dir",
        path=out.path,
    )


def new_name() -> str:
    """Of a hidden directory of this process, which `clear` removes when the process has ended."""
    system, pid, began = own_process() or ("0" * 16, 0, 0)
    return f"{CLAIM}-{system}-{pid}-{began}-{secrets.token_hex(4)}"


def _discarded_if_over(out: Directory, name: str) -> bool:
    if _DONE.fullmatch(name):
        out.remove_all(name)
        return True
    found = _NAME.fullmatch(name)
    if found is None or not out.is_directory(name):
        return False
    process = (found[1], int(found[2]), int(found[3]))
    if not has_ended(process, own_process()):
        return False
    _discard(out, name)
    return True


def _discard(out: Directory, name: str) -> None:
    """Remove a directory with all in it, and first the other links of its files in `out`."""
    if not out.is_directory(name):
        return
    with out.below(name) as hidden:
        inner = [n for n in hidden.names() if _NAME.fullmatch(n) and hidden.is_directory(n)]
        for each in inner:  # what was in CLAIM
            with hidden.below(each) as claimed:
                _remove_shown(out, claimed)
        _remove_shown(out, hidden)
    out.sync()
    out.remove_all(name)


def _remove_shown(out: Directory, hidden: Directory) -> None:
    # an index or another file by which a model loads is among the first: before its weights
    for name in sorted(hidden.names(), key=lambda n: not n.endswith(".json")):
        mine, shown = hidden.status(name), out.status(name)
        if mine is None or shown is None or is_hidden(name):
            continue
        if stat.S_ISDIR(mine.st_mode) and stat.S_ISDIR(shown.st_mode):
            with out.below(name) as there, hidden.below(name) as here:
                _remove_shown(there, here)
            with suppress(OSError):  # a user's file is there
                out.remove_directory(name)
        elif os.path.samestat(mine, shown):
            out.remove(name)
