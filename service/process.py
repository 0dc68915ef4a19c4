"""How this process treats cores and memory; set before torch is loaded and before there are threads."""

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8  # of <malloc.h>


def set_up() -> None:
    """Let threads that wait sleep, and keep one heap for all threads.

    An environment that says something about either is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for each other sleep after some microseconds of spinning: beside other processes they would
        # otherwise keep the cores from those that they wait for.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if "MALLOC_ARENA_MAX" not in os.environ:
        # glibc gives threads heaps of their own, and what was freed in one serves no other: memory would creep up as
        # request after request has its peak in another thread.
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
