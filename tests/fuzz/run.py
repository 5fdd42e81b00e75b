"""Fuzz the readers by coverage: `python -m tests.fuzz.run [TARGET …] [--seconds N]`.

Needs `pip install -r requirements/fuzz.txt`. Each input has 10 seconds and 1 GiB. What is found is
kept in tests/fuzz/corpus/<target>; the tests read all of that each time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.support.limits import seconds

CORPUS = Path(__file__).parent / "corpus"
_LIMITS = ("-timeout=10", "-rss_limit_mb=1024", "-max_len=65536", "-reduce_inputs=1")


def main() -> int:
    import atheris

    with atheris.instrument_imports(include=["smckpt"]):
        from tests.fuzz.targets import TARGETS, quiet

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", choices=[[], *TARGETS])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    asked = parser.parse_args()
    if len(asked.target) != 1:  # libFuzzer ends the process, so each has one of its own
        again = [sys.executable, "-m", "tests.fuzz.run", "--seconds", str(asked.seconds)]
        limit = seconds(asked.seconds + 300)
        return max(
            subprocess.run([*again, each], timeout=limit).returncode
            for each in asked.target or TARGETS
        )
    folder = CORPUS / asked.target[0]
    folder.mkdir(parents=True, exist_ok=True)
    options = [*_LIMITS, f"-max_total_time={asked.seconds}", f"-artifact_prefix={folder}/found-"]
    atheris.Setup([sys.argv[0], *options, str(folder)], quiet(TARGETS[asked.target[0]]))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
