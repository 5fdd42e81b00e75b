"""JSON that two readers could understand differently is refused, with the right checksum too."""

from __future__ import annotations

import json

import pytest

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.headers import read_header
from smckpt.checkpoint.records.sealed import open_json, open_sections, seal_json, strict_json
from smckpt.errors import CorruptCheckpointError

BODY = {"format": [2, 0], "epoch": 1, "long": ["x" * 40] * 40}


def resealed(old: str, new: str) -> bytes:
    """A sealed file whose text was changed, with a checksum that is right again."""
    data = seal_json(BODY)
    begins = data.index(b'"body":') + len(b'"body":')
    text = data[begins : -len(b"}\n")]
    assert hex64(crc64(text)).encode() in data
    changed = text.replace(old.encode(), new.encode(), 1)
    assert changed != text
    return data[:begins].replace(hex64(crc64(text)).encode(), hex64(crc64(changed)).encode()) + (
        changed + data[-2:]
    )


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_a_number_that_json_does_not_have_is_refused(text: str) -> None:
    json.loads(text)  # Python alone would take it
    with pytest.raises(ValueError, match="not a JSON number"):
        strict_json(text)


def test_a_key_that_stands_twice_is_refused_at_any_depth() -> None:
    with pytest.raises(ValueError, match="'b' occurs twice"):
        strict_json('{"a": [{"b": 1, "b": 2}]}')


@pytest.mark.parametrize("new", ['"epoch":NaN', '"epoch":1,"epoch":2', '"epoch":[{"a":1,"a":2}]'])
def test_sealed_files_are_read_strictly(new: str) -> None:
    open_json(seal_json(BODY), "manifest")
    with pytest.raises(CorruptCheckpointError, match="not valid JSON") as caught:
        open_json(resealed('"epoch":1', new), "manifest")
    assert caught.value.path == "manifest"


def test_a_part_that_has_a_key_on_two_lines_is_refused() -> None:
    assert set(open_sections(seal_json(BODY), "part")) == set(BODY)
    with pytest.raises(CorruptCheckpointError, match="contains a key twice"):
        open_sections(resealed('"epoch":1', '"epoch":1,\n"epoch":2'), "part")


def test_a_header_with_a_number_that_json_does_not_have_is_refused() -> None:
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":NaN}}'
    data = len(text).to_bytes(8, "little") + text
    with pytest.raises(CorruptCheckpointError, match="not a JSON number"):
        read_header(lambda a, b: data[a:b], len(data), "file")
