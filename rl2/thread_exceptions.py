"""Raises exceptions in other threads."""

import ctypes
import threading
import time

SECONDS_TO_START = 1.0  # in which a new thread runs, unless it is lost


def raise_in_thread(thread: threading.Thread, exception_type: type[BaseException]) -> None:
    """Raises an exception of this type in a thread that lives, as soon as it runs Python code.

    Until a new thread runs, Python has it under the number of the thread that starts it, and may
    raise the exception there. It would end at once, and `start` would wait for it forever. So the
    exception waits until no thread is about to start.
    """
    number = ctypes.c_ulong(thread.ident or 0)
    deadline = time.monotonic() + SECONDS_TO_START
    while True:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            # `start` adds the new thread to _limbo under this lock, and that removes itself. So no
            # new thread can have the number meanwhile.
            if not thread.is_alive():
                return
            if not threading._limbo or time.monotonic() > deadline:  # type: ignore[attr-defined]
                error = ctypes.py_object(exception_type)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
                return
        time.sleep(0.0005)
