"""Exceptions that are raised in other threads."""

from common import run

START_THREADS = """
import threading, time
from rl2.thread_exceptions import raise_in_thread

class Ended(BaseException):
    pass

def start_threads():
    while not is_over.is_set():
        try:
            threading.Thread(target=time.sleep, args=(0,)).start()
        except Ended:
            pass

is_over = threading.Event()
starter = threading.Thread(target=start_threads, daemon=True)
starter.start()
for _ in range(3000):
    raise_in_thread(starter, Ended)
    time.sleep(0.0003)
is_over.set()
starter.join(20)
print("lost" if starter.is_alive() else "goes on")
"""


def test_a_thread_that_starts_threads_goes_on_after_each_exception():
    """With Python's own call it is lost after some hundreds: it waits for a thread that has ended.

    In a process of its own, which has no busy threads of other tests.
    """
    assert run("-c", START_THREADS).stdout == "goes on\n"
