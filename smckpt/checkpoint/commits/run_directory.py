"""The directory of a run: the steps that it has saved below a root.

The manager and the doors of frameworks list, choose and remove steps by it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, TypeVar

from smckpt.checkpoint.commits.contents import contents_of, what_is_missing
from smckpt.checkpoint.commits.discover import FoundCheckpoint, found_at, walk
from smckpt.checkpoint.commits.remove import finish_removals, remove_checkpoint
from smckpt.errors import (
    CheckpointError,
    CheckpointPinnedError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    StorageError,
    UsageError,
)
from smckpt.storage import Storage
from smckpt.storage.faults import twice
from smckpt.storage.urls import file_url, relative_url

_FIELD = re.compile(r"\{(step|epoch)(?::0([1-9]\d?)d)?\}")
_COORDINATE = re.compile(r"\{(pp|tp|ep|fsdp)\}")  # of a rank, in the names of the groups
_BRACE = re.compile(r"\{(step|epoch|pp|tp|ep|fsdp)\b")  # where a template begins in a path


@dataclass(frozen=True)
class Template:
    """A relative path with {step} and perhaps {epoch}: "{step}", "{epoch}/{step:08d}".

    Its last directory may name the groups of a step instead, by the coordinates of their ranks:
    "{step}/tp{tp}_ep{ep}_fsdp{fsdp}". Without it the groups have names such as "tp0_shard1".

    A directory that does not fit it is not a checkpoint of the run, and the manager does not touch
    it.
    """

    text: str

    def __post_init__(self) -> None:
        fields = [match[1] for match in _FIELD.finditer(self.steps)]
        fixed = _COORDINATE.sub("", self.group) + _FIELD.sub("", self.steps)
        named = _COORDINATE.findall(self.group)
        wrong = ""
        if fields.count("step") != 1 or fields.count("epoch") > 1:
            wrong = "it needs {step} once, and {epoch} at most once"
        elif {"{", "}", "\0", "\\"} & set(fixed):
            wrong = (
                "it may hold {step} and {epoch}, or {step:08d} with zeros, and in a last directory "
                "of their own {pp}, {tp}, {ep} and {fsdp}"
            )
        elif len(set(named)) < len(named):
            wrong = "it names a coordinate twice"
        elif {"", ".", ".."} & set(self.text.split("/")):
            wrong = "it is not a relative path below the root"
        elif re.search(r"\}\d*\{", self.text) or re.search(r"\}\d|\d\{", self.text):
            wrong = "a digit next to a number looks like a part of it"
        if wrong:
            raise UsageError(
                f"the template of the steps' directories is {self.text!r}: {wrong}",
                remedy='such as "step_{step}"',
            )

    @property
    def steps(self) -> str:
        """The template of the steps' directories."""
        return self.text[: -len(self.group) - 1] if self.group else self.text

    @property
    def group(self) -> str:
        """The template of the groups' directories below a step's; "" if the manager names them."""
        last = self.text.rpartition("/")[2]
        return last if _COORDINATE.search(last) else ""

    @property
    def depth(self) -> int:
        """Levels of directories from the root to a step's directory."""
        return self.steps.count("/") + 1

    def group_of(self, coordinates: Mapping[str, int]) -> str:
        """The directory of the group whose ranks have these coordinates: pp, tp, ep, fsdp.

        Raises:
            UsageError: the ranks differ in a coordinate that the template lacks.
        """
        lacking = sorted(set(coordinates) - set(_COORDINATE.findall(self.group)))
        if lacking:
            raise UsageError(
                f"the template is {self.text!r}, and the groups of a step differ in {lacking} too",
                remedy="name that in its last directory, such as {tp}; or leave that directory "
                "out, and pass SaveOptions(parallel_state=) if the job has one",
            )
        return _COORDINATE.sub(lambda match: str(coordinates.get(match[1], 0)), self.group)

    def subpath(self, step: int, epoch: int | None = None) -> str:
        """The path from the root to a step's directory.

        Raises:
            UsageError: a number that the template needs is missing or negative.
        """
        numbers = {"step": step, "epoch": epoch}

        def written(match: re.Match[str]) -> str:
            number = numbers[match[1]]
            if type(number) is not int or number < 0:
                raise UsageError(
                    f"{match[1]} is {number!r}, and the template {self.text!r} needs it",
                    remedy=f"pass a whole number from 0 as {match[1]}=",
                )
            return f"{number:0{match[2] or 1}d}"

        return _FIELD.sub(written, self.steps)

    def step_of(self, subpath: str) -> int | None:
        """The step whose directory is `subpath`; None if it does not fit the template."""
        parts, at = [], 0
        for match in _FIELD.finditer(self.steps):
            parts += [re.escape(self.steps[at : match.start()]), rf"(?P<{match[1]}>\d+)"]
            at = match.end()
        parts.append(re.escape(self.steps[at:]))
        found = re.fullmatch("".join(parts), subpath, re.ASCII)
        if found is None:
            return None
        numbers = {name: int(text) for name, text in found.groupdict().items()}
        written = self.subpath(numbers["step"], numbers.get("epoch"))
        return numbers["step"] if written == subpath else None


def rooted(path: str) -> tuple[str, Template]:
    """The root of a run, and the template of the directories below it: of "run/step_{step}"
    "run/" and "step_{step}". A path without such names is a root with the template "{step}".

    Raises:
        UsageError: the names do not make a template.
    """
    field = _BRACE.search(path)
    if field is None:
        return path, Template("{step}")
    at = path.rfind("/", 0, field.start()) + 1
    return path[:at] or ".", Template(path[at:].rstrip("/"))


log = logging.getLogger("smckpt")

Whole = Callable[[FoundCheckpoint], bool]
Result = TypeVar("Result")


class RetentionPolicy(Protocol):
    """Says which steps of a run stay. A step that no policy keeps is deleted.

    Rank 0 calls it in a thread, after each commit of the run. Where it raises, nothing is deleted.
    """

    def kept(self, steps: Sequence[FoundCheckpoint], whole: Whole) -> Iterable[FoundCheckpoint]:
        """Those of `steps` that stay.

        Args:
            steps: the run's committed steps, oldest first. `step`, `committed_at` and
                `metadata["metrics"]` are those of the save.
            whole: whether every file of a step is there, in its full size. It lists the step's
                directory. Do not count a step that is not whole: it cannot be restored.
        """
        ...


@dataclass(frozen=True)
class Damaged:
    """A step whose newest commit cannot be read, or a directory above steps.

    Args:
        step: None: of a directory above steps.
        subpath: the path from the root.
    """

    step: int | None
    subpath: str
    error: CheckpointError

    @property
    def name(self) -> str:
        return f"what is below {self.subpath}" if self.step is None else f"step {self.step}"


class RunDirectory:
    """The steps below a root, in directories whose names fit a template. One rank uses it.

    A commit never changes, so a directory is read once, until this run saves there.
    """

    def __init__(self, root: Storage, template: Template) -> None:
        self.root = root
        self.template = template
        self._known: dict[str, FoundCheckpoint] = {}
        self._finished = False  # the removals that were cut short
        self._logged: set[tuple[str, str]] = set()  # of damaged ones: path and message

    def directories(self) -> list[tuple[int, str]]:
        """(step, path from the root) of all directories that fit the template, newest first.

        Raises:
            StorageError: the root cannot be read.
        """
        return self._walk()[0]

    def _walk(self) -> tuple[list[tuple[int, str]], list[Damaged]]:
        """The directories that fit the template, newest first; and what stands in their way: a
        directory that cannot be listed, a file or a link with a step's name."""
        subpaths, damaged = list[str](), list[Damaged]()
        for here, names, error in walk(self.root, self.template.depth):
            subpath = relative_url(here.url, self.root.url)
            level = subpath.count("/") + 1 if subpath else 0
            if isinstance(error, StorageError) and (not level or error.of_store):
                raise error
            if error is not None:
                damaged.append(Damaged(None, subpath, error))
            elif level == self.template.depth:
                subpaths.append(subpath)
            elif level == self.template.depth - 1 and here.folder is not None:
                damaged += self._no_directories(here, subpath, names)
        steps = ((self.template.step_of(subpath), subpath) for subpath in subpaths)
        found = sorted(
            ((step, subpath) for step, subpath in steps if step is not None), reverse=True
        )
        damaged.sort(key=lambda one: math.inf if one.step is None else one.step, reverse=True)
        return found, damaged

    def _no_directories(
        self, here: Storage, subpath: str, names: Sequence[str]
    ) -> Iterator[Damaged]:
        others = {*here.names(all_kinds=True)} - {*names}
        others -= {*here.list_dirs()} if others else set()  # a save has begun since
        for name in sorted(others):
            path = f"{subpath}/{name}" if subpath else name
            if (step := self.template.step_of(path)) is not None:
                error = CorruptCheckpointError(
                    "a file, or a link that leads to no directory, has the name of a step's "
                    "directory",
                    remedy="find out what made it, and move it away",
                    path=file_url(here.url, name),
                )
                yield Damaged(step, path, error)

    def newest_first(self) -> Iterator[FoundCheckpoint | Damaged]:
        """The committed steps, newest first. Each is read when the caller takes it. One that the
        store cannot read costs only itself.

        Raises:
            StorageError: the store as a whole failed, so that it may hold a newer step.
        """
        return self._each(self._found)

    def _each(self, look: Callable[[int, str], Result | None]) -> Iterator[Result | Damaged]:
        directories, damaged = self._walk()
        present = {subpath for _, subpath in directories}
        self._known = {subpath: one for subpath, one in self._known.items() if subpath in present}
        for step, subpath in directories:
            while damaged and (damaged[0].step is None or damaged[0].step > step):
                yield damaged.pop(0)
            try:
                found = twice(partial(look, step, subpath))
            except CheckpointError as error:
                if isinstance(error, StorageError):
                    if error.of_store:
                        raise
                    self.root.list_dirs()  # raises if no step can be read
                yield Damaged(step, subpath, error)
                continue
            if found is not None:
                yield found
        yield from damaged

    def _found(self, step: int, subpath: str) -> FoundCheckpoint | None:
        """The commit of a step's directory; None: an unfinished save."""
        found = self._known.get(subpath) or found_at(self.root.join(subpath))
        if found is None:
            return None
        if found.step != step:
            log.warning("%s is skipped: it holds step %s", found, found.step)
            return None
        self._known[subpath] = found
        return found

    def all(self, *, sure: bool = False) -> list[FoundCheckpoint]:
        """The committed steps, oldest first, without damaged ones. The log names each of those
        once.

        Args:
            sure: raise if the store can read none of the steps, so that it does not look as if
                there were none.
        """
        return [*self._read(self.newest_first(), sure)][::-1]

    def newest(self) -> FoundCheckpoint | None:
        """The newest committed step that can be read; None: there is none.

        Raises:
            StorageError: the store as a whole fails, or can read none of the steps.
        """
        return self.first(self._found)

    def first(self, look: Callable[[int, str], Result | None]) -> Result | None:
        """The first result of `look` at the steps' directories, newest first, as `newest` takes
        the first commit.

        Args:
            look: called with the step and the path from the root. What raises `CheckpointError` is
                passed over.
        """
        return next(self._read(self._each(look), True), None)

    def _read(self, each: Iterator[Result | Damaged], sure: bool) -> Iterator[Result]:
        """Those that could be read. The log names each of the others once."""
        found, unread = False, list[StorageError]()
        for one in each:
            if not isinstance(one, Damaged):
                found = True
                yield one
                continue
            if (key := (one.subpath, one.error.message)) not in self._logged:
                self._logged.add(key)
                log.warning("%s is passed over: %s", one.name, one.error)
            if isinstance(one.error, StorageError):
                unread.append(one.error)
        if sure and unread and not found:
            raise unread[0]

    def keep(
        self,
        policies: Sequence[RetentionPolicy],
        newest: str,
        of_run: Callable[[FoundCheckpoint], bool] | None = None,
    ) -> list[FoundCheckpoint]:
        """Delete the steps that no policy keeps, as `doomed` finds them, and finish removals that
        were cut short; returns those deleted. Without a policy all stay."""
        gone = [one for one in self.doomed(policies, newest, of_run) if self.remove(one)]
        if policies and not self._finished:
            self._finished = self.finish()
        return gone

    def doomed(
        self,
        policies: Sequence[RetentionPolicy],
        newest: str | None = None,
        of_run: Callable[[FoundCheckpoint], bool] | None = None,
    ) -> list[FoundCheckpoint]:
        """The steps that no policy keeps, oldest first; none where the newest is not whole.

        Args:
            newest: the directory of the newest commit, relative to the root. None: that of the
                newest step.
            of_run: whether a step is the run's. Others stay. None: all are.

        Raises:
            UsageError: a policy fails.
        """
        if not policies:
            return []
        found = [one for one in self.all() if of_run is None or of_run(one)]
        subpaths = {self.subpath_of(one): one for one in found}
        last = subpaths.get(newest) if newest is not None else (found[-1] if found else None)
        if last is None:
            log.warning("old checkpoints stay: the newest one is not found")
            return []

        @cache  # a policy may ask again
        def whole(one: FoundCheckpoint) -> bool:
            if missing := self.missing(one):
                log.warning("%s is not whole and does not count as kept: %s", one, missing)
            return not missing

        if not whole(last):
            return []  # `whole` has logged why
        # The newest commit stays, also where its step and its clock make it look like an old one:
        # the run went back to an older step, and the clock was set back.
        stay = {last.path}.union(*(_kept(policy, found, whole) for policy in policies))
        return [one for one in found if one.path not in stay]

    def missing(self, one: FoundCheckpoint) -> str:
        """The first file of a step that is missing or cut short, or why that cannot be told; "" if
        all are whole."""
        try:
            return what_is_missing(self.root.join(self.subpath_of(one)), one.identity)
        except CheckpointError as error:
            return str(error)

    def remove(self, found: FoundCheckpoint, level: int = logging.INFO) -> bool:
        """Delete a checkpoint; False, with a line in the log, if a reader has pinned it, a newer
        commit has taken its place, or the store refuses. `finish` deletes the rest.

        Args:
            level: of the line for what a run meets now and then: a pin, a newer commit.
        """
        subpath = self.subpath_of(found)
        try:
            contents = contents_of(self.root.join(subpath), found.identity)
            if contents.identity != found.identity:
                return False
            remove_checkpoint(contents)
        except (CheckpointPinnedError, CheckpointReplacedError) as error:
            log.log(level, "the checkpoint of step %s stays: %s", found.step, error)
            return False
        except CheckpointError as error:
            log.warning("%s stays for now: %s", found, error)
            self._finished = False
            return False
        finally:
            self._known.pop(subpath, None)
        log.info("deleted the checkpoint of step %s, %s", found.step, found)
        return True

    def finish(self) -> bool:
        """Finish removals that were cut short, by an earlier run or by an error; whether all are
        finished."""
        done = True
        for _, subpath in self.directories():
            try:
                finish_removals(self.root.join(subpath))
            except CheckpointError as error:
                done = False
                log.warning("a deletion that was cut short is not finished: %s", error)
        return done

    def subpath_of(self, found: FoundCheckpoint) -> str:
        """The path from the root to a checkpoint below it."""
        return relative_url(found.path, self.root.url)

    def forget(self) -> None:
        """Forget everything, so that the next look reads it again: other processes may have saved
        or deleted."""
        self._known = {}

    def changed(self, subpath: str) -> None:
        """Read this directory again: this run saved there or deleted from it."""
        self._known.pop(subpath, None)


def _kept(policy: RetentionPolicy, found: Sequence[FoundCheckpoint], whole: Whole) -> set[str]:
    """The paths of the steps that one policy keeps."""
    try:
        kept = {str(one) for one in policy.kept(tuple(found), whole)}
    except Exception as error:  # the user's code
        raise UsageError(
            f"the retention policy {policy!r} raised {type(error).__name__}: {error}",
            remedy="correct its method `kept`; until then nothing is deleted",
        ) from error
    if unknown := kept.difference(found):
        raise UsageError(
            f"the retention policy {policy!r} keeps {min(unknown)!r}, which is none of the steps "
            "that it was given",
            remedy="return steps of the list; until then nothing is deleted",
        )
    return kept
