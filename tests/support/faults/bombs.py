"""Small files that ask for endless work or memory, and all readers with bounds on both.

`python -m tests.support.faults.bombs FOLDER [NAME …]` makes them, reads each with every reader,
each in a process of its own with limits, and prints a line of JSON for each: what it raised, its
seconds of the processor and the memory that it took.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import tarfile
import traceback
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smckpt.checkpoint.records.crc import crc64, hex64
from smckpt.checkpoint.records.sealed import open_json, seal_json
from smckpt.errors import CheckpointError
from tests.support.faults.forge import reforge
from tests.support.limits import seconds
from tests.support.saves import Group, hybrid, state_of

__all__ = ["BOMBS", "READERS", "read_in_bounds"]

PROCESSOR = 20  # seconds
MEMORY = 1 << 30  # bytes above what the imports take
SMALL = 4 << 20  # bytes of a bomb


def _group(folder: Path) -> Path:
    Group(folder, (0,), state=state_of(hybrid((0,), 1))).save()
    return next(folder.glob("manifest-*"))


def _rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A checkpoint of one rank whose manifest has these rows too."""
    plain = {"dtype": "float32", "before": ["model"], "after": []}
    more = [{**plain, "path": ["model", row["fqn"]], "geometry": row} for row in rows]
    reforge(_group(folder), lambda body: body["layout"]["rows"].extend(more))


def _boxes(folder: Path, count: int, dims: int) -> None:
    """Boxes that overlap in each dimension."""
    size = 8 * count
    boxes = [
        [[(7 * n + 3 * d) % (4 * count) for d in range(dims)], [2 * count + n] * dims]
        for n in range(count)
    ]
    rule = {"fqn": "w", "shape": [size] * dims, "boxes": boxes, "holders": [[0, 1, 1]]}
    _rows(folder, [rule])


def _huge_sizes(folder: Path) -> None:
    shape = [1 << 60] * 8
    holders = [[0, 1, 1]]
    box = [[[0] * 8, [1 << 60] * 8]]
    _rows(folder, [{"fqn": "w", "shape": shape, "boxes": box, "holders": holders}])


def _chunks(folder: Path) -> None:
    rows = [
        {"fqn": f"w{n}", "shape": [1 << 40, n + 1], "mesh": 0, "placements": ["R", "SS0/4096"]}
        for n in range(20_000)
    ]
    _rows(folder, rows)


def _many_ranks(folder: Path) -> None:
    runs = [[n, 1 << 20, 1] for n in range(1000)]
    boxes = [[[0], [1]]]
    _rows(folder, [{"fqn": "w", "shape": [1], "boxes": boxes, "holders": runs}])


def _deep(folder: Path) -> None:
    path = _group(folder)
    body = b"[" * 1_000_000 + b"]" * 1_000_000
    path.write_bytes(b'{"crc64":"' + hex64(crc64(body)).encode() + b'","body":' + body + b"}\n")


def _packed(folder: Path) -> None:
    """A table that is as long as its packed bytes allow, of as many values."""
    noise = base64.b64encode(random.Random(0).randbytes(SMALL // 3)).decode()
    values = "[]," * (SMALL // 2)
    table = zlib.compress(f'{{"rows": [{values}"{noise}"]{" " * (18 * SMALL)}}}'.encode(), 1)
    path = _group(folder)
    body = open_json(path.read_bytes(), str(path))
    packed = {"format": [4, 0], "packed": ["layout"], "layout": base64.b64encode(table).decode()}
    data = json.dumps({**body, **packed}).encode()
    path.write_bytes(b'{"crc64":"' + hex64(crc64(data)).encode() + b'","body":' + data + b"}\n")


def _sparse(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _group(folder)
        with next(folder.glob(kind)).open("r+b") as file:
            file.truncate(6 << 30)

    return make


def _header(head: bytes) -> Callable[[Path], None]:
    """A data file with this header. Its checksums are right."""

    def make(folder: Path) -> None:
        manifest = _group(folder)
        (path,), (sums,) = folder.glob("*.safetensors"), folder.glob("*.crc")
        old = {crc64(path.read_bytes()): b"", path.stat().st_size: b""}
        data = struct.pack("<Q", len(head)) + head + bytes(64)
        path.write_bytes(data)
        pieces = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
        sums.write_bytes(struct.pack(f"<{len(pieces)}Q", *map(crc64, pieces)))
        before, size = (*old,)

        def told(body: Any) -> Any:
            text = json.dumps(body).replace(hex64(before), hex64(crc64(data)))
            new = json.loads(text.replace(f'"size": {size}', f'"size": {len(data)}'))
            body.clear()
            body.update(new)

        (part,) = folder.glob("part-*")
        crc = hex64(crc64(part.read_bytes()))
        after = reforge(part, told)
        reforge(manifest, told)
        reforge(
            manifest, lambda body: body.update(json.loads(json.dumps(body).replace(crc, after)))
        )

    return make


def _plain_header(head: bytes) -> Callable[[Path], None]:
    """A model of somebody else's with this header."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        data = struct.pack("<Q", len(head)) + head + bytes(64)
        (folder / "model.safetensors").write_bytes(data)

    return make


_SHAPE = ",".join(["1152921504606846976"] * 150_000).encode()
_SLOT = b'{"dtype":"U8","shape":[64],"data_offsets":[0,64]}'
HEADERS = {
    "a shape of countless sizes": b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,64]}}'
    % _SHAPE,
    "one key twice": b'{"a":%s,"a":%s}' % (_SLOT, _SLOT),
    "overlapping": b'{"a":%s,"b":%s}' % (_SLOT, _SLOT),
    "deep": b"[" * 1_000_000,
    "a key twice, many times": b"{" + b",".join([b'"a":1'] * 400_000) + b"}",
    "an int of many digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "a name of countless wrappers": b'{"%s":%s}' % (b"module." * 500_000 + b"w", _SLOT),
}


def _dcp(body: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"\x80\x04" + body)
        (folder / "__0_0.distcp").write_bytes(bytes(64))

    return make


def _memo(value: Any, again: bytes, times: int) -> bytes:
    """`value` under number 0 of the memo, and an operation with it many times."""
    head = pickle.dumps(value, protocol=4)
    body = head[2:-1] if head[2:3] != b"\x95" else head[11:-1]
    return body.replace(b"\x94", b"") + b"q\x00" + b"0" + again * times + b"."


def _metadata_of(entries: bytes, stored: bytes = b"}") -> bytes:
    of = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
    return (
        of
        + b"}(X\x13\0\0\0state_dict_metadata"
        + entries
        + b"X\x0c\0\0\0storage_data"
        + stored
        + b"ub."
    )


def _tensor_entry(chunks: bytes, size: bytes) -> bytes:
    of = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n)\x81}("
    return of + b"X\x06\0\0\0chunks" + chunks + b"X\x04\0\0\0size" + size + b"ub"


def _same_list(count: int) -> bytes:
    """Tensors that all have one list of parts, and one shape."""
    long = b"](" + b"K\1" * count + b"eq\x01"
    entries = b"}(" + b"X\1\0\0\0a" + _tensor_entry(long, b"h\x01")
    for at in range(count):
        name = f"{at:08d}".encode()
        entries += b"X\x08\0\0\0" + name + _tensor_entry(b"h\x01", b"h\x01")
    return _metadata_of(entries + b"u")


DCP = {
    "one list for countless tensors": _same_list(20_000),
    "one long number as a key again and again":
        _memo(1 << 4_000_000, b"}h\x00Ns0", 60_000),
    "two equal texts as keys again and again":
        b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\x000X\x00\x00\x10\x00" + b"a" * (1 << 20)
        + b"q\x010}" + b"h\x00Nsh\x01Ns" * 150_000 + b".",
    "nested tuples": b")" + b"\x85" * 1_000_000 + b".",
    "one list in countless sets":
        b"](" + b"K\1" * 20_000 + b"eq\x000" + b"cbuiltins\nset\nh\x00\x85R0" * 20_000 + b"].",
    "marks": b"(" * 3_000_000 + b".",
}  # fmt: skip


def _shared(folder: Path) -> None:
    """Tensors of DCP that share one list of parts, which the pickle's memo has."""
    import torch
    from torch.distributed.checkpoint import metadata as of

    folder.mkdir(parents=True)
    chunk = of.ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    chunks = [chunk] * 3000
    of_dtype = of.TensorProperties(torch.float32)
    tensor = of.TensorStorageMetadata(of_dtype, torch.Size([1]), chunks)
    names = [f"w{number}" for number in range(3000)]
    index = {of.MetadataIndex(name, torch.Size([0])): _Info("__0_0.distcp", 0, 4) for name in names}
    whole = of.Metadata(dict.fromkeys(names, tensor), None, index)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    (folder / "__0_0.distcp").write_bytes(bytes(64))


@dataclass
class _Info:
    """As `_StorageInfo` of DCP."""

    relative_path: str
    offset: int
    length: int


def _archive(many: bool) -> Callable[[Path], None]:
    """An archive of torch.save, with countless records; or one whose sizes are quoted."""

    def make(folder: Path) -> None:
        import torch

        folder.mkdir(parents=True)
        plain = io.BytesIO()
        torch.save({"w": torch.ones(4)}, plain)
        if not many:
            data = plain.getvalue()
            at = data.rfind(b"PK\x01\x02")
            wide = struct.pack("<LL", 1 << 31, 1 << 31)
            (folder / "model.pt").write_bytes(data[: at + 20] + wide + data[at + 28 :])
            return
        with zipfile.ZipFile(plain) as old, zipfile.ZipFile(folder / "model.pt", "w") as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
            for number in range(30_000):
                new.writestr(f"archive/data/x{number}", b"")

    return make


def _deflated(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as packed:
            for member in ("archive/data.pkl", "archive/data/0", "w.npy"):
                packed.writestr(member, bytes(300 << 20))

    return make


def _shapes(folder: Path) -> None:
    """Tensors that share one endless shape, which the pickle's memo has."""
    folder.mkdir(parents=True)
    long = b"(" + b"K\1" * 100_000 + b"tq\x01"
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQq\x02"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(h\x02K\0h\x01h\x01\x89}tR"
    body = b"\x80\2" + long + b"0" + storage + b"0](" + tensor * 20_000 + b"e."
    with zipfile.ZipFile(folder / "model.pt", "w") as packed:
        packed.writestr("archive/data.pkl", body)
        packed.writestr("archive/data/0", bytes(16))
        packed.writestr("archive/version", b"3")


def _tar(folder: Path) -> None:
    """Headers for all members, and countless members."""
    folder.mkdir(parents=True)
    more = {f"smckpt.{number}": "x" for number in range(20_000)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=more) as packed:
        for number in range(5_000):
            packed.addfile(tarfile.TarInfo(f"./model_weights/m{number}"))
    (folder / "model.nemo").write_bytes(out.getvalue())


def _publish(folder: Path) -> None:
    """Publishes of which each changes one block of a tensor of many."""
    count = 20_000
    numbers = [*range(count)]
    base: str | None = None
    for number in range(60):
        blocks = numbers if base is None else [0]
        tensor = [8, 8 + (count << 20), blocks, "0" * 16 * len(blocks)]
        file = {"size": 8 + (count << 20), "crc64": "0" * 16, "header": "0" * 16,
                "whole": base is None, "tensors": {"w": tensor}}  # fmt: skip
        body = {"format": [1, 0], "number": number, "base": base, "unit": "block",
                "delta": ["delta.bin", 8], "files": {"model.safetensors": file}, "removed": [],
                "facts": {}}  # fmt: skip
        place = folder / f"{number:08d}"
        place.mkdir(parents=True)
        data = seal_json(body)
        (place / "publish.json").write_bytes(data)
        base = hex64(crc64(data))


BOMBS: dict[str, Callable[[Path], None]] = {
    "boxes in 2 dimensions": lambda folder: _boxes(folder, 3000, 2),
    "boxes in 12 dimensions": lambda folder: _boxes(folder, 40, 12),
    "sizes of 2^60": _huge_sizes,
    "countless chunks": _chunks,
    "countless ranks": _many_ranks,
    "deep JSON": _deep,
    "packed table": _packed,
    **{f"sparse {kind}": _sparse(kind) for kind in ("part-*", "*.crc", "manifest-*")},
    **{f"header: {what}": _header(head) for what, head in HEADERS.items()},
    **{f"safetensors: {what}": _plain_header(head) for what, head in HEADERS.items()},
    **{f"metadata: {what}": _dcp(body) for what, body in DCP.items()},
    "metadata: one list of parts": _shared,
    "archive of many records": _archive(True),
    "archive of quoted sizes": _archive(False),
    "archive that inflates": _deflated("model.pt"),
    "npz that inflates": _deflated("model.npz"),
    "archive of one endless shape": _shapes,
    "tar of headers for all": _tar,
    "publishes": _publish,
}


# -- readers ---------------------------------------------------------------------------------------


def _command(*arguments: str) -> None:
    from click.testing import CliRunner

    from smckpt.cli.app import app

    done = CliRunner().invoke(app, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception


def _export(folder: Path) -> None:
    from smckpt.translate import ExportOptions, export_hf

    files = [path for path in folder.iterdir() if path.suffix in (".pt", ".nemo", ".npz")]
    out = folder.with_name(folder.name + "-out")
    export_hf(
        files[0] if files else folder,
        out,
        options=ExportOptions(against_model=False, naming="module"),
        prefix="",
    )


def _load(folder: Path) -> None:
    import smckpt

    smckpt.load(None, checkpoint_id=str(folder))


def _apply(folder: Path) -> None:
    from smckpt.translate import apply_published

    apply_published(folder, folder.with_name(folder.name + "-host"))


def _browse(folder: Path) -> None:
    from smckpt.cli.browse_facts import Facts
    from smckpt.manager.doctor import examine
    from smckpt.storage import open_storage

    top = open_storage(str(folder))
    page = Facts(top, verify="quick", histograms="*")
    for condition in examine(top, 1):
        page.add_step(condition)


READERS: dict[str, Callable[[Path], None]] = {
    "ls": lambda folder: _command("ls", str(folder.parent)),
    "show": lambda folder: _command("show", str(folder)),
    "verify": lambda folder: _command("verify", str(folder)),
    "diff": lambda folder: _command("diff", str(folder), str(folder)),
    "doctor": lambda folder: _command("doctor", str(folder)),
    "load": _load,
    "export": _export,
    "apply": _apply,
    "browse": _browse,
}


def read_in_bounds(read: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """What a reader raised, in a child with limits; with its processor's seconds and its memory."""
    near, far = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(near)
        code, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        limit = int(seconds(PROCESSOR))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        with open("/proc/self/statm") as file:
            space = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (space + MEMORY, space + MEMORY))
        said = ""
        try:
            read(folder)
        except CheckpointError as error:
            said = f"{type(error).__name__}: {error.message[:200]}"
        except BaseException as error:
            said, code = f"{type(error).__name__}: {error}", 1
            traceback.print_exc(limit=-6)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(far, json.dumps([said, grown >> 10]).encode()[:60_000])
        sys.stderr.flush()
        os._exit(code)
    os.close(far)
    with open(near, "rb") as file:
        text = file.read()
    _, status, usage = os.wait4(child, 0)
    said, grown = json.loads(text) if text else ("died", 0)
    took = usage.ru_utime + usage.ru_stime
    return {"said": said, "code": os.waitstatus_to_exitcode(status), "seconds": round(took, 2),
            "MiB": grown}  # fmt: skip


def main(top: Path, names: list[str]) -> None:
    import torch  # noqa: F401  # once, for all children

    import smckpt.cli.app
    import smckpt.manager.doctor
    import smckpt.translate  # noqa: F401

    for name in names or BOMBS:
        folder = top / name.replace(" ", "-").replace("*", "x").replace(":", "") / "it"
        BOMBS[name](folder)
        for reader, read in READERS.items():
            found = read_in_bounds(read, folder)
            print(json.dumps({"bomb": name, "reader": reader, **found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
