"""The template of the directories in which a run saves its steps, and their groups."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from smckpt.errors import UsageError

__all__ = ["Template", "rooted"]

_FIELD = re.compile(r"\{(step|epoch)(?::0([1-9]\d?)d)?\}")
_PLACE = re.compile(r"\{(pp|tp|ep|fsdp)\}")  # of a rank, in the names of the groups
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
        fixed = _PLACE.sub("", self.group) + _FIELD.sub("", self.steps)
        places = _PLACE.findall(self.group)
        wrong = ""
        if fields.count("step") != 1 or fields.count("epoch") > 1:
            wrong = "it needs {step} once, and {epoch} at most once"
        elif {"{", "}", "\0", "\\"} & set(fixed):
            wrong = (
                "it may hold {step} and {epoch}, or {step:08d} with zeros, and in a last directory "
                "of their own {pp}, {tp}, {ep} and {fsdp}"
            )
        elif len(set(places)) < len(places):
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
        return last if _PLACE.search(last) else ""

    @property
    def depth(self) -> int:
        """Levels of directories from the root to a step's directory."""
        return self.steps.count("/") + 1

    def group_of(self, coordinates: Mapping[str, int]) -> str:
        """The directory of the group whose ranks have these coordinates: pp, tp, ep, fsdp.

        Raises:
            UsageError: the ranks differ in a coordinate that the template lacks.
        """
        lacking = sorted(set(coordinates) - set(_PLACE.findall(self.group)))
        if lacking:
            raise UsageError(
                f"the template is {self.text!r}, and the groups of a step differ in {lacking} too",
                remedy="name that in its last directory, such as {tp}; or leave that directory "
                "out, and pass SaveOptions(parallel_state=) if the job has one",
            )
        return _PLACE.sub(lambda match: str(coordinates.get(match[1], 0)), self.group)

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
