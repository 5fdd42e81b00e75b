"""The one decoder of records and messages."""

from __future__ import annotations

from tests.support import child

THREADS = """
import sys, threading
from dataclasses import make_dataclass
from smckpt.decoding import decode

sys.setswitchinterval(1e-6)
data = {f"f{n}": {f"a{m}": m for m in range(30)} for n in range(20)}
for turn in range(100):
    inner = make_dataclass(f"Inner{turn}", [(f"a{n}", int) for n in range(30)])
    kind = make_dataclass(f"Kind{turn}", [(f"f{n}", inner) for n in range(20)])
    gate, made = threading.Barrier(6), []

    def run():
        gate.wait()
        made.append(decode(kind, data))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert made == [decode(kind, data)] * 6
"""


def test_threads_may_decode_a_kind_for_the_first_time_at_once() -> None:
    """The process ended with SIGSEGV: one thread used what another had half made."""
    child.run(THREADS)
