"""The template of the directories in which a run saves its steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from smckpt.errors import UsageError

__all__ = ["Template"]

_FIELD = re.compile(r"\{(step|epoch)(?::0([1-9]\d?)d)?\}")


@dataclass(frozen=True)
class Template:
    """A relative path with {step} and perhaps {epoch}: "{step}", "{epoch}/{step:08d}".

    A directory that does not fit it is not a checkpoint of the run, and the manager does not touch
    it.
    """

    text: str

    def __post_init__(self) -> None:
        fields = [match[1] for match in _FIELD.finditer(self.text)]
        fixed = _FIELD.sub("", self.text)
        wrong = ""
        if fields.count("step") != 1 or fields.count("epoch") > 1:
            wrong = "it needs {step} once, and {epoch} at most once"
        elif {"{", "}", "\0", "\\"} & set(fixed):
            wrong = "it may hold {step} and {epoch}, or {step:08d} with zeros, and nothing else"
        elif {"", ".", ".."} & set(self.text.split("/")):
            wrong = "it is not a relative path below the root"
        elif re.search(r"\}\d*\{", self.text) or re.search(r"\}\d|\d\{", self.text):
            wrong = "a digit next to a number looks like a part of it"
        if wrong:
            raise UsageError(f"layout is {self.text!r}: {wrong}", remedy='such as "step_{step}"')

    @property
    def depth(self) -> int:
        """Levels of directories below the root."""
        return self.text.count("/") + 1

    def place(self, step: int, epoch: int | None = None) -> str:
        """The path from the root to a step's directory.

        Raises:
            UsageError: a number that the template needs is missing or negative.
        """
        numbers = {"step": step, "epoch": epoch}

        def written(match: re.Match[str]) -> str:
            number = numbers[match[1]]
            if type(number) is not int or number < 0:
                raise UsageError(
                    f"{match[1]} is {number!r}, and the layout {self.text!r} needs it",
                    remedy=f"pass a whole number from 0 as {match[1]}=",
                )
            return f"{number:0{match[2] or 1}d}"

        return _FIELD.sub(written, self.text)

    def step_of(self, place: str) -> int | None:
        """The step whose directory is `place`; None if it does not fit the template."""
        parts, at = [], 0
        for match in _FIELD.finditer(self.text):
            parts += [re.escape(self.text[at : match.start()]), rf"(?P<{match[1]}>\d+)"]
            at = match.end()
        parts.append(re.escape(self.text[at:]))
        found = re.fullmatch("".join(parts), place, re.ASCII)
        if found is None:
            return None
        numbers = {name: int(text) for name, text in found.groupdict().items()}
        written = self.place(numbers["step"], numbers.get("epoch"))
        return numbers["step"] if written == place else None
