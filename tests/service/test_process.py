"""What the program sets for itself before torch is loaded, seen from outside: in processes of their own."""

import os
import subprocess
import sys

import pytest

THREADS_ALLOCATE = """
import ctypes, threading
from service import process
process.set_up()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
places = []
def allocate():
    places.append(libc.malloc(64))
thread = threading.Thread(target=allocate)
thread.start(); thread.join()
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
print(int(heap[0], 16) <= places[0] < int(heap[1], 16))
"""
SPINS = "import os; from service import process; process.set_up(); print(os.environ.get('GOMP_SPINCOUNT'))"


SETTLES = """
import gc
from service import process
process.set_up()
print(gc.isenabled())
kept = [[] for _ in range(1000)]
process.settle()
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""


def output_of(program: str, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=inherited | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
def test_threads_share_one_heap_unless_the_environment_says_otherwise() -> None:
    assert output_of(THREADS_ALLOCATE) == "True"
    assert output_of(THREADS_ALLOCATE, MALLOC_ARENA_MAX="8") == "False"


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_sleep_unless_the_environment_says_otherwise(variables: dict[str, str], spins: str) -> None:
    assert output_of(SPINS, **variables) == spins


def test_garbage_is_collected_once_the_process_has_settled_but_not_among_what_was_there() -> None:
    assert output_of(SETTLES).split() == ["False", "True", "True"]
