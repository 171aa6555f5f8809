"""Many independent computations, on any executor of processes, with the finished ones kept on disk."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from itertools import chain
from multiprocessing import resource_tracker
from typing import Any

import torch

from lightning_taskinfo._files import StrPath, make_folder, read_result, write_result
from lightning_taskinfo._warn import first_line

Function = Callable[..., Any]


def run_jobs(
    function: Function,
    jobs: Mapping[str, Any],
    *,
    folder: StrPath | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    on_done: Callable[[str, Any], None] | None = None,
) -> dict[str, Any]:
    """Return ``{name: function(argument)}`` for every job; one that is already on disk is read, not run.

    Every job runs with one torch thread, wherever it runs, so that all executors give the same
    numbers.

    Args:
        function: Does one job and returns JSON-like values. Other processes import it: it must be
            defined at the top of a module, and so must what its argument refers to.
        jobs: The argument of each, by a name that is good as a file name.
        folder: Where ``<name>.json`` is written, atomically, as soon as a job is finished; nowhere
            where ``None``.
        executor: Anything like :class:`concurrent.futures.ProcessPoolExecutor`, such as Dask's
            ``client.get_executor()`` (with ``threads_per_worker=1``); stays open. A pool of
            ``workers`` where ``None``.
        workers: Processes of our own pool, at most one per cell; as many as there are cores where
            ``None``, and ``0`` for this process alone.
        on_done: Called with name and result, in this process, for every job, those from the disk
            first.

    Raises:
        ValueError: If ``executor`` is a pool of threads, which share one random generator; or
            ``workers`` negative.
        RuntimeError: If a job fails, with its name, after those that were running have been kept.
    """
    check_executor(executor, workers)
    paths = {}
    if folder is not None:
        paths = {name: make_folder(folder) / f"{name}.json" for name in jobs}
    kept = {name: read_result(path) for name, path in paths.items() if path.exists()}
    todo = {name: argument for name, argument in jobs.items() if name not in kept}
    results = {}
    for name, result in chain(kept.items(), _computed(function, todo, executor, workers)):
        if name in paths and name in todo:
            write_result(paths[name], result)
        results[name] = result
        if on_done is not None:
            on_done(name, result)
    return {name: results[name] for name in jobs}


def check_executor(executor: Executor | None, workers: int | None) -> None:
    """Check the two as :func:`run_jobs` does, for callers that write something before."""
    if isinstance(executor, ThreadPoolExecutor):
        raise ValueError(
            "`executor` must run processes, got a ThreadPoolExecutor: threads share one random state."
        )
    if workers is not None and workers < 0:
        raise ValueError(f"`workers` must be at least 0, got {workers}.")


def check_travels(
    job: Any,
    parts: str,
    executor: Executor | None,
    workers: int | None,
) -> None:
    """Raise a ``ValueError`` for what other processes cannot import, before any of them starts.

    Args:
        job: What is sent to them.
        parts: Arguments that it is made of, for the message.
        executor: The user's; it may have ways of its own, as Dask has.
        workers: How many processes; 0 for none.
    """
    if executor is not None or workers == 0:
        return
    try:
        with open(os.devnull, "wb") as nowhere:  # what is large is not held twice
            pickle.dump(job, nowhere)
    except Exception as error:  # what cannot be pickled says so in many ways
        raise ValueError(
            f"`workers` must be 0 where {parts} cannot be pickled; functions and classes at the top of a module can "
            f"({first_line(error)})."
        ) from error


def _computed(
    function: Function,
    jobs: Mapping[str, Any],
    executor: Executor | None,
    workers: int | None,
) -> Iterator[tuple[str, Any]]:
    """Yield name and result of each job as it is finished; the first failure is raised after the rest is in."""
    if executor is None and workers == 0:
        for name, argument in jobs.items():
            try:
                yield name, on_one_thread(function, argument)
            except Exception as error:
                raise _failure(name, error) from error
        return
    failed = []
    with _pool(executor, workers, len(jobs)) as pool:
        with nullcontext() if executor is not None else _deaf_children():
            names = {
                pool.submit(on_one_thread, function, argument): name
                for name, argument in jobs.items()
            }
        for future in as_completed(names):
            if future.cancelled():
                continue
            if problem := future.exception():
                failed.append((names[future], problem))
                for other in names:
                    other.cancel()
            else:
                yield names[future], future.result()
    for name, problem in failed:
        raise _failure(name, problem) from problem


@contextmanager
def _pool(executor: Executor | None, workers: int | None, jobs: int) -> Iterator[Executor]:
    """The user's executor, left open; or a spawned pool of our own, closed with what it still has to do.

    A plain pool waits for its processes after Ctrl-C, which may be an hour of training: here they
    are killed.
    """
    if executor is not None:
        yield executor
        return
    count = max(1, min(workers or os.cpu_count() or 1, jobs))
    others = {*multiprocessing.active_children()}
    # Spawned, since forked processes would inherit locks of torch's threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_end_with_parent)
    try:
        yield pool
    except KeyboardInterrupt:
        for process in {*multiprocessing.active_children()} - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C, which a terminal sends to all: each would print a traceback of its own.

    The signal is blocked, which processes inherit, and not ignored: one that arrives meanwhile is
    delivered afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it unblocks the signal where it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this process with a parent that was killed.

    Processes of a plain pool go on with their job, and write into a folder that the next run
    continues from.
    """

    def wait() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def on_one_thread(function: Function, *arguments: Any) -> Any:
    """Call a function with one torch thread: sums are split over threads, and their number shows in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(threads)


def _failure(name: str, error: BaseException) -> RuntimeError:
    guard = ""
    if isinstance(error, BrokenProcessPool):
        guard = ' A script that uses processes needs `if __name__ == "__main__":`.'
    return RuntimeError(f"{name} failed: {type(error).__name__}: {error}{guard}")
