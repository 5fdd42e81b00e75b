"""Values that an object computes once."""

from __future__ import annotations

from dataclasses import dataclass, field

from smckpt.layout.mesh import remembered


@dataclass(frozen=True)
class Square:
    side: int
    asked: list[int] = field(default_factory=list, compare=False)

    @remembered
    def area(self) -> int:
        """In units."""
        self.asked.append(self.side)
        return self.side**2


def test_a_value_is_computed_once_and_by_each_object_for_itself() -> None:
    small, large = Square(2), Square(3)
    assert [small.area, small.area, large.area, small.area] == [4, 4, 9, 4]
    assert small.asked == [2] and large.asked == [3]


def test_what_is_remembered_takes_no_part_in_comparisons() -> None:
    asked, fresh = Square(2), Square(2)
    assert asked.area == 4
    assert asked == fresh and hash((asked.side,)) == hash((fresh.side,))
    assert fresh.asked == []


def test_the_class_shows_how_it_is_computed() -> None:
    assert isinstance(Square.area, remembered)
    assert Square.area.__doc__ == "In units."
