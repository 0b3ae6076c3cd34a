"""Exceptions that are raised in other threads."""

import threading
import time

from rl2.thread_exceptions import raise_in_thread

NUM_EXCEPTIONS = 5000


class Ended(BaseException):
    pass


def test_a_thread_that_starts_threads_goes_on_after_each_exception():
    """With Python's own call a thread is lost after some hundreds, and its starter waits for it."""
    is_over = threading.Event()
    num_started = 0

    def start_threads():
        nonlocal num_started
        while not is_over.is_set():
            try:
                thread = threading.Thread(target=time.sleep, args=(0,))
                thread.start()
                num_started += 1
            except Ended:
                pass

    starter = threading.Thread(target=start_threads, daemon=True)
    starter.start()
    for _ in range(NUM_EXCEPTIONS):
        raise_in_thread(starter, Ended)
        time.sleep(0.0003)
    is_over.set()
    starter.join(60)
    assert not starter.is_alive() and num_started > 100
