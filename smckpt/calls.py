"""What calls have in common: their options, their threads, and that a thread is in one public call
at a time.

A signal handler runs on top of the code that it interrupted. If that is a call of smckpt, a second
call from the handler could wait for a lock that its own thread holds. The interrupted call is on
the thread's stack. This module looks for it there, which works at every instruction and leaves no
state to undo.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, ParamSpec, TypeVar

from smckpt.errors import UsageError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R")


def alone(name: str = "", *, outer: bool = False) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a function refuse calls from a thread that is already inside such a function.

    Args:
        name: the call's name in the error, if not the function's own.
        outer: the function itself may call other such functions, but no outer one.
    """

    def of(function: Callable[_P, _T]) -> Callable[_P, _T]:
        called = name or function.__name__

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            _refuse_within(called, outer)
            # Under torch.compile the compiler would trace smckpt itself, and fail in it.
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            act = function if disable is None else disable(function)
            return act(*args, **kwargs)

        return call

    return of


def undisturbed(call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Make a call in a thread of ours, and print what it raises. A handler of logging that raises
    would end the thread, and whoever waits for the thread would wait for ever."""
    try:
        call(*args, **kwargs)
    except BaseException:  # sys.exit too
        with contextlib.suppress(Exception):
            traceback.print_exc()


def started(thread: threading.Thread) -> bool:
    """Start a thread. False where the interpreter ends and starts none, as Python 3.12 does in its
    exit handlers."""
    try:
        thread.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
        return False
    return True


class Threads(ThreadPoolExecutor):
    """Threads that make calls. As the interpreter ends, it starts none: then who submits a call
    makes it. A save that is committed only then still deletes older steps, and its `on_commit=` may
    load, verify and export."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
        made: Future[_T] = Future()
        try:
            made.set_result(fn(*args, **kwargs))
        except BaseException as error:
            made.set_exception(error)
        return made


def in_threads(
    call: Callable[[_T], _R], items: Iterable[_T], threads: int, name: str = ""
) -> list[_R]:
    """The result of each call, in order, of `threads` calls at once. The first failure cancels the
    calls that have not begun, waits for the others, and is raised. One thread is this one."""
    wanted = list(items)
    if threads == 1 or len(wanted) < 2:
        return list(map(call, wanted))
    with Threads(min(threads, len(wanted)), name) as pool:
        return list(pool.map(call, wanted))


def end_process(status: int) -> NoReturn:
    """End the process at once, whatever became of its streams (closed, None, a broken pipe)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def while_alive(method: Callable[[], None]) -> Callable[[], None]:
    """A call of an object's method that does not keep the object alive: nothing, once it is gone.
    For what is registered until the process ends."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def checked(kind: type[_T], value: _T | None) -> _T:
    """The value of an argument `options`. None: the defaults.

    Raises:
        UsageError: it is something else.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise UsageError(f"options is {value!r}", remedy=f"pass smckpt.{kind.__name__}(...)")
    return value


def changed(options: Any) -> dict[str, Any]:
    """The options that are not the defaults."""
    defaults = vars(type(options)())
    return {name: value for name, value in vars(options).items() if value != defaults[name]}


def _refuse_within(called: str, outer: bool) -> None:
    """Look for such a call on the stack. This is a separate function so that no frame refers to
    itself: a frame that does keeps the caller's tensors until the garbage collector runs."""
    code = sys._getframe(1).f_code
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is code and (outer or not frame.f_locals["outer"]):
            raise UsageError(
                f"{called} was called while this thread was in {frame.f_locals['called']}",
                remedy="let the signal handler set a flag, and check it in the training loop",
            )
        frame = frame.f_back
