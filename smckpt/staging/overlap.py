"""Copies from a device that go on after `async_save` has returned, and the proof of their bytes.

    digests of the sources ─▶ the call returns ─▶ copies ─▶ optimizers may step ─▶ digests again

Nobody can make every writer of a parameter wait. So the image is compared with the state of the
call. Before the call returns, the device computes digests (`digest.py`) of all bytes that are
copied later. After the copies, the image goes back to the device in pieces, which computes the same
digests of it. If they differ, the save fails by the tensor's name, and later saves of the process
block.
"""

from __future__ import annotations

import concurrent.futures
import logging
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from smckpt.errors import MemoryBudgetError, StateError, few
from smckpt.staging.digest import CHUNK, chunks_of, digests_on

log = logging.getLogger("smckpt")

_PIECE = 256 * CHUNK  # bytes: as many go back to the device at once
_NAMED = 4  # tensors that an error names


class SideStream:
    """A stream of a CUDA device beside those of training."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device, self._stream = device, self._module.Stream(device)
        # queues the digests of contiguous tensors on the device
        self.digests = digests_on(device)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(self._device)

    def entered(self) -> AbstractContextManager[Any]:
        """In this context the calling thread queues its work on the stream."""
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to host memory."""
        target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait for all work that is queued on the stream."""
        self._stream.synchronize()


@dataclass(frozen=True)
class Flight:
    """Copies under way. copied: ends when the state may change again. proven: ends later, when the
    image is compared with the state of the call; its exception fails the save."""

    copied: concurrent.futures.Future[None]
    proven: concurrent.futures.Future[None]


class Overlap:
    """The overlapped copies of one process. A save under which a tensor changed is the last one.

    While copies are under way, each step of an optimizer of this process waits for them first.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream | None] = {}
        self._flying: list[tuple[Flight, float]] = []  # with the seconds to wait for it
        self._hook: RemovableHandle | None = None
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self.refusal: str | None = None  # why the process overlaps no more

    def block(self, why: str) -> None:
        """Log why a save blocks that was to overlap; once for each reason."""
        if why not in self._logged:
            self._logged.add(why)
            log.warning("a save blocks until the state is copied, and does not overlap: %s", why)

    def prepare(self, device: torch.device) -> None:
        """Compile what the first copy from a device needs."""
        self._stream(device)

    def takes(self, source: torch.Tensor) -> bool:
        """Whether a copy from this tensor may go on after the call."""
        return (
            self._stream(source.device) is not None
            and source.is_contiguous()
            and not (source.is_conj() or source.is_neg())
        )

    def begin(
        self, copies: Sequence[tuple[str, torch.Tensor, torch.Tensor]], timeout: float
    ) -> Flight | None:
        """Compute the digests of the sources, and begin to copy them.

        Args:
            copies: (name, target, source), each source one that `takes` accepts.
            timeout: seconds that a step of an optimizer waits for the copies at most.

        Returns:
            None if the device has no memory for the digests: nothing has begun.
        """
        by_device: dict[torch.device, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        for copy in copies:
            by_device.setdefault(copy[2].device, []).append(copy)
        batches = []
        try:
            for device, device_copies in by_device.items():
                stream = self._stream(device)
                assert stream is not None
                batches.append(_Batch(stream, device, device_copies))
        except torch.OutOfMemoryError as error:
            self.block(f"the device has no memory for the digests that prove the copy ({error})")
            return None
        flight = Flight(concurrent.futures.Future(), concurrent.futures.Future())
        with self._lock:
            self._flying.append((flight, timeout))
            if self._hook is None:
                before_step = self._before_step
                if "torch._dynamo" in sys.modules:  # else compiled steps would be compiled again
                    before_step = torch.compiler.disable(before_step)  # type: ignore[no-untyped-call]
                self._hook = register_optimizer_step_pre_hook(before_step)
        run = threading.Thread(
            target=self._run, args=(batches, flight), name="smckpt-staging", daemon=True
        )
        run.start()
        return flight

    def wait(self) -> None:
        """Wait for all copies under way, within their limits."""
        for flight, timeout in tuple(self._flying):
            concurrent.futures.wait([flight.copied], timeout)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.wait()

    def _landed(self, flight: Flight) -> None:
        flight.copied.set_result(None)
        with self._lock:
            self._flying = [each for each in self._flying if each[0] is not flight]
            if self._flying or self._hook is None:
                return
            # torch raises if a hook goes while it walks through several. Then ours stays, without
            # anything to wait for, until it is alone at the end of another save's copies.
            hooks = self._hook.hooks_dict_ref()
            if hooks is not None and len(hooks) == 1:
                self._hook.remove()
                self._hook = None

    def _made_stream(self, device: torch.device) -> SideStream | None:
        """The stream that copies from a device; None if its copies block."""
        return SideStream(device) if device.type == "cuda" else None

    def _stream(self, device: torch.device) -> SideStream | None:
        if device not in self._streams:
            try:
                self._streams.setdefault(device, self._made_stream(device))
            except Exception as error:  # of the compiler, or of a torch without it
                self._streams.setdefault(device, None)
                self.refusal = f"no kernel for the digests of {device} can be compiled ({error})"
                self.block(self.refusal)
        return self._streams[device]

    def _run(self, batches: list[_Batch], flight: Flight) -> None:
        failed: BaseException | None = None
        for batch in batches:
            try:
                batch.copy()
            except BaseException as error:  # the future reports whatever the thread raises
                failed = error
        self._landed(flight)
        try:
            if failed is not None:
                raise failed
            changed = [name for batch in batches for name in batch.changed()]
            if changed:
                self.refusal = f"{changed[0]} changed while an earlier save copied it"
                raise StateError(
                    f"{few(list(dict.fromkeys(changed)), _NAMED)} changed while the save copied "
                    "the state",
                    remedy="call wait_for_staging() of the save's handle before anything but the "
                    "step() of an optimizer changes the state, or save with "
                    'SaveOptions(staging="block"), as this process does from now on',
                )
        except torch.OutOfMemoryError as error:
            lacking = MemoryBudgetError(
                f"the device has no memory to prove the copy: {error}",
                remedy='free some of it, or save with SaveOptions(staging="block")',
            )
            lacking.__cause__ = error
            flight.proven.set_exception(lacking)
        except BaseException as error:
            flight.proven.set_exception(error)
        else:
            flight.proven.set_result(None)


class _Batch:
    """Copies from one device. When it is made, the sources' digests are computed: no stream changes
    them after that."""

    def __init__(
        self,
        stream: SideStream,
        device: torch.device,
        copies: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    ) -> None:
        self._stream, self._copies = stream, copies
        self._images: list[tuple[str, torch.Tensor]] = []
        most = min(max(source.nbytes for _, _, source in copies), _PIECE)
        stream.synchronize()  # nothing says which stream wrote a tensor last
        with torch.no_grad(), stream.entered():
            self._back = torch.empty(most, dtype=torch.uint8, device=device)
            self._digests = stream.digests([source for _, _, source in copies])
            stream.finish()

    def copy(self) -> None:
        """Copy to the arena, wait, and release the sources."""
        with torch.no_grad(), self._stream.entered():
            try:
                for _, target, source in self._copies:
                    self._stream.copy(target, source)
            finally:  # also after a failure: copies under way still read and write
                self._stream.finish()
        self._images = [(name, target) for name, target, _ in self._copies]
        self._copies = ()

    def changed(self) -> list[str]:
        """The names of the chunks whose image has another digest than the source had."""
        found, names = [], []
        with torch.no_grad(), self._stream.entered():
            for name, target in self._images:
                names += [name] * chunks_of(target.nbytes)
                data = target.view(-1).view(torch.uint8)
                for start in range(0, data.numel(), _PIECE):
                    piece = data[start : start + _PIECE]
                    back = self._back[: piece.numel()]
                    back.copy_(piece, non_blocking=True)
                    found.append(self._stream.digests([back]))
            differ = torch.cat(found) != self._digests
            return [names[chunk] for chunk in differ.nonzero().view(-1).tolist()]
