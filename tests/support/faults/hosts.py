"""Hosts on one machine: network namespaces on one bridge, each with an agent that runs programs.

A host dies with all its processes. Making them takes the rights of root.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.limits import seconds

# It is forked from a server, and its programs from it: each import of torch takes seconds of a
# processor.
_AGENT = """
import ctypes, importlib, json, os, runpy, signal, sys, tempfile, time
network = os.open("/var/run/netns/" + sys.argv[1], os.O_RDONLY)
assert ctypes.CDLL(None).setns(network, 0x40000000) == 0  # CLONE_NEWNET
for each in sys.argv[2:]:
    importlib.import_module(each)

def begun(program, words, env):
    out, error = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    pid = os.fork()
    if pid:
        return pid, out, error
    os.environ.update(env)
    os.dup2(out.fileno(), 1)
    os.dup2(error.fileno(), 2)
    sys.argv[:] = program, *words
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")
    sys.exit()

for line in sys.stdin:
    program, words, envs, limit = json.loads(line)
    ranks, codes, until = [begun(program, words, env) for env in envs], {}, time.monotonic() + limit
    while len(codes) < len(ranks):
        for pid, *_ in ranks:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
            elif pid not in codes and time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    texts = [[file.seek(0) or file.read() for file in files] for _, *files in ranks]
    code = next((code for pid, *_ in ranks if (code := codes[pid])), 0)
    print(json.dumps([code, "".join(out for out, _ in texts),
                      "".join(error[-4000:] for _, error in texts)]), flush=True)
"""


def _agent(name: str, imports: Sequence[str]) -> warm.Piped:
    return warm.Piped([sys.executable, "-c", _AGENT, name, *imports])


@dataclass
class Host:
    name: str
    address: str
    imports: tuple[str, ...]
    agent: warm.Piped

    def begin(self, program: Path, words: Sequence[str], *envs: Mapping[str, str]) -> None:
        """Run the program once in each environment."""
        asked = str(program), words, envs, seconds(300)
        self.agent.stdin.write(json.dumps(asked) + "\n")
        self.agent.stdin.flush()

    def ended(self) -> tuple[int, str, str]:
        code, out, error = json.loads(self.agent.stdout.readline())
        return code, out, error

    def die(self) -> None:
        """Kill every process of the host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds(20),
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait(seconds(20))

    def revive(self) -> None:
        """The host is back, with nothing in its memory."""
        self.close()
        self.agent = _agent(self.name, self.imports)

    def slow(self, rate: str) -> None:
        """Let so much through the host's link, such as "8mbit"."""
        limit = "root", "tbf", "rate", rate, "burst", "64kbit", "latency", "400ms"
        _run("tc", "qdisc", "add", "dev", f"{self.name}o", *limit)
        _run("tc", "-n", self.name, "qdisc", "add", "dev", "e0", *limit)

    def carried(self) -> int:
        """Bytes that went over the host's link."""
        counters = Path(f"/sys/class/net/{self.name}o/statistics")
        return sum(int((counters / f"{each}_bytes").read_text()) for each in ("rx", "tx"))

    def link(self, state: str) -> None:
        """Cut the host's link ("down"), or mend it ("up")."""
        _run("ip", "link", "set", f"{self.name}o", state)

    def close(self) -> None:
        self.agent.close()

    def processes(self) -> list[str]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=seconds(20)
        )
        return listed.stdout.split()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=seconds(20))


@contextlib.contextmanager
def keeper_service() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A keeper of this host as a service: its name and process."""
    name = f"k{os.getpid()}"
    command = [sys.executable, "-m", "smckpt.cli", "keeper", name, "--address", "127.0.0.1"]
    with subprocess.Popen(
        [*command, "--budget", "0.1"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"keeper {name} at 127.0.0.1:")
        yield name, process
        process.kill()


@contextlib.contextmanager
def hosts(count: int, *imports: str) -> Iterator[list[Host]]:
    """Skips the test where namespaces cannot be made.

    Args:
        imports: modules that the programs import, besides `torch.distributed`.
    """
    own = f"sm{secrets.token_hex(3)}"  # the kernel removes those of a test before it later
    names = [f"{own}h{number}" for number in range(count)]
    bridge, net = f"{own}b", f"10.{int(own[2:4], 16)}.{int(own[4:6], 16)}"
    made: list[Host] = []
    try:
        try:
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "link", "set", bridge, "up")
        except (OSError, subprocess.SubprocessError):
            pytest.skip("network namespaces take the rights of root")
        for number, name in enumerate(names):
            _run("ip", "netns", "add", name)
            _run(
                "ip", "link", "add", f"{name}o", "type", "veth", "peer", "name", "e0", "netns", name
            )
            _run("ip", "link", "set", f"{name}o", "master", bridge, "up")
            _run("ip", "-n", name, "address", "add", f"{net}.{number + 1}/24", "dev", "e0")
            _run("ip", "-n", name, "link", "set", "e0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            imported = ("torch.distributed", *imports)
            made.append(Host(name, f"{net}.{number + 1}", imported, _agent(name, imported)))
        yield made
    finally:
        for host in made:
            if host.agent.poll() is None:
                host.die()
            host.close()
        for name in names:
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, timeout=seconds(20)
            )
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, timeout=seconds(20))
