"""Processes that share work, and that leave nothing behind however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that have ended when the block is left, at once if an exception (Ctrl-C too) leaves it."""
    others = set(multiprocessing.active_children())
    # Not fork: the process that calls this may have threads, as every notebook kernel has.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder:
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(folder,))
        completed = False
        try:
            yield pool
            completed = True
        finally:
            if not completed:
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
            pool.shutdown(cancel_futures=True)


def _start_worker(folder: str) -> None:
    """Settle how this process ends: with its parent, which alone sees to Ctrl-C and to temporary files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = folder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
