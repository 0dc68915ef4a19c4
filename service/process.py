"""How this process treats cores and memory."""

import ctypes
import gc
import os
from contextlib import suppress

ENVIRONMENT = {"GOMP_SPINCOUNT": "10000", "MALLOC_ARENA_MAX": "1"}
"""For a process whose first import is not this module: what `set_up` does to threads and heaps."""
_M_ARENA_MAX = -8  # of <malloc.h>


def set_up() -> None:
    """Let threads that wait sleep, keep one heap for all threads, and collect no garbage until `settle`.

    To be called before torch is loaded and before there are threads. An environment that says something about threads
    or heaps is left alone.
    """
    gc.disable()  # nothing of what is imported goes away again, and looking for it takes a quarter of the time
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that wait for each other sleep after some microseconds of spinning: beside other processes they would
        # otherwise keep the cores from those that they wait for.
        os.environ.setdefault("GOMP_SPINCOUNT", ENVIRONMENT["GOMP_SPINCOUNT"])
    if "MALLOC_ARENA_MAX" not in os.environ:
        # glibc gives threads heaps of their own, and what was freed in one serves no other: memory would creep up as
        # request after request has its peak in another thread.
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def settle() -> None:
    """Collect garbage from here on, but never look at what there is now.

    That is some 400,000 objects of torch, transformers and the model, which a full collection takes half a second to go
    through, while all requests wait.
    """
    gc.freeze()
    gc.enable()
