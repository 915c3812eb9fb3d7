"""The memory allocator of a process that runs programs on CPU cores: jemalloc, where the system has it.

XLA's matmuls allocate scratch memory in each call, and a program its temporaries. The C library searches lists of free
chunks for each of them, with one lock for all threads. With jemalloc, a step of m4.Quickstart on two virtual devices
takes up to a quarter less time, and compiling a large model for a TPU slice a fifth less (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
import sys

PACKAGE = "libjemalloc2"  # of Debian and Ubuntu
_LIBRARY = "libjemalloc.so.2"
_DIRECTORIES = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/lib")
# Freed memory is kept for the next step: the system would fill its pages with zeros again.
_OPTIONS = "dirty_decay_ms:-1,muzzy_decay_ms:-1"
_PURGE_ALL_ARENAS = b"arena.4096.purge"  # 4096 is MALLCTL_ARENAS_ALL
# Options of mallopt(3): never shrink the heap, allocate everything inside it, and one heap for all threads, because
# only one can grow far.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def use_jemalloc():
    """Restarts this process with jemalloc; call it before the process does anything that must not be done twice.

    Only the start of a process can replace its allocator. Returns if jemalloc is not installed, and if `LD_PRELOAD` is
    set: by the restart, or by a user, who chooses the allocator then (the C library's, if it is set to nothing).
    """
    environment = preloading()
    can_restart = sys.executable and sys.argv[0] not in ("", "-")  # not a program read from standard input
    if environment and can_restart and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **os.environ})


def preloading() -> dict[str, str]:
    """Returns environment variables with which a process starts with jemalloc; empty where it is not installed."""
    files = (pathlib.Path(directory, _LIBRARY) for directory in _DIRECTORIES)
    library = next((str(file) for file in files if file.exists()), None) if sys.platform == "linux" else None
    return {"LD_PRELOAD": library, "MALLOC_CONF": _OPTIONS} if library else {}


def return_freed_memory():
    """Returns the memory that this process has freed to the system.

    Both allocators keep it for the next step of a program, which needs none of what is freed once, when a program
    starts: buffers of files, and arrays in other layouts.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if platform.libc_ver()[0] == "glibc":
        library.malloc_trim(0)
    if hasattr(library, "mallctl"):  # jemalloc
        library.mallctl(_PURGE_ALL_ARENAS, None, None, None, ctypes.c_size_t(0))


def is_missing() -> bool:
    """Returns whether this process would have jemalloc if it were installed."""
    return sys.platform == "linux" and not preloading() and "LD_PRELOAD" not in os.environ


def keep_freed_memory():
    """Makes the C library of this process keep freed memory for the next step of a program, as jemalloc does.

    XLA allocates the temporaries of a CPU program at every call and frees them at its end. By default each large one
    goes back to the system, which fills it with zeros for the next call, page by page: a quarter of a small model's
    step. Call this before JAX has devices: their threads would have heaps of their own by then.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    set_option = ctypes.CDLL(None).mallopt
    for option, value in ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0), (_ARENA_MAX, 1)):
        set_option(option, value)
