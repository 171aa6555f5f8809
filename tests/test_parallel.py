"""Jobs give the same numbers on every executor, and the finished ones are not run again."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_taskinfo._files import read_result, write_result
from lightning_taskinfo._parallel import _deaf_children, run_jobs
from tests.ranks import forked

JOBS = {f"seed-{seed}": seed for seed in range(4)}


def draw(seed):
    return {"value": torch.randn(3, generator=torch.Generator().manual_seed(seed)).sum().item()}


def draw_and_count_threads(seed):
    return {**draw(seed), "threads": torch.get_num_threads()}


def fail_at_two(seed):
    if seed == 2:
        raise ValueError("two is refused")
    return seed


def write_pid_and_wait(path):
    if path == "nowhere":
        return
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_every_executor_gives_the_same_numbers_with_one_torch_thread_a_job():
    expected = {name: {**draw(seed), "threads": 1} for name, seed in JOBS.items()}
    assert run_jobs(draw_and_count_threads, JOBS, workers=0) == expected
    here = run_jobs(draw_and_count_threads, JOBS, workers=2)
    assert here == expected
    assert list(here) == list(JOBS)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
        assert run_jobs(draw_and_count_threads, JOBS, executor=executor) == expected
        assert executor.submit(int, "3").result() == 3  # still open
    assert torch.get_num_threads() == 2, "this process keeps its own"


def test_a_finished_job_is_read_and_not_run(tmp_path):
    first = run_jobs(draw, JOBS, workers=0, folder=tmp_path)
    write_result(tmp_path / "seed-1.json", "kept")
    (tmp_path / "seed-3.json").unlink()
    seen = {}
    again = run_jobs(
        draw,
        JOBS,
        workers=0,
        folder=tmp_path,
        on_done=lambda name, value: seen.update({name: value}),
    )
    assert again == {**first, "seed-1": "kept"} == seen


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_failing_job_is_named_and_the_finished_ones_are_kept(tmp_path, place):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        where = {"workers": 0} if place == "here" else {"executor": pool}
        with pytest.raises(RuntimeError, match="seed-2 failed: ValueError: two is refused"):
            run_jobs(fail_at_two, JOBS, folder=tmp_path, **where)
    assert read_result(tmp_path / "seed-1.json") == 1
    assert not (tmp_path / "seed-2.json").exists()


def die(_):
    os._exit(1)


def test_a_pool_that_breaks_names_the_guard_of_scripts():
    with pytest.raises(
        RuntimeError, match=r'a failed: BrokenProcessPool: .* needs `if __name__ == "__main__":`'
    ):
        run_jobs(die, {"a": 1}, workers=1)


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    """Otherwise they would go on writing into a folder that the next run continues from."""
    path = tmp_path / "pid"
    parent = forked(run_jobs, write_pid_and_wait, {"a": str(path)}, workers=1)
    while not (path.exists() and path.read_text()):
        assert parent.is_alive()
        time.sleep(0.01)
    parent.kill()
    parent.join()
    pid, until = int(path.read_text()), time.monotonic() + 20
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(pid)


def test_an_interrupt_ends_the_processes_at_once_and_they_print_nothing(tmp_path):
    path = tmp_path / "pid"
    code = (
        "import signal, sys; from tests.test_parallel import run_jobs, write_pid_and_wait\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job would ignore\n"
        "if __name__ == '__main__': run_jobs(write_pid_and_wait, {'a': sys.argv[1], 'b': 'nowhere'}, workers=2)"
    )
    command, environment = (
        [sys.executable, "-c", code, str(path)],
        {**os.environ, "PYTHONPATH": os.getcwd()},
    )
    parent = subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    while not (path.exists() and path.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does, to all of them
    _, printed = parent.communicate(timeout=30)
    assert not runs(int(path.read_text()))
    assert printed.count("Traceback") == 1
    assert printed.endswith("KeyboardInterrupt\n")


SLOW_TO_START = """
import signal, sys, time
from pathlib import Path
if __name__ == "__mp_main__":
    Path(sys.argv[1]).write_text("here")
    time.sleep(60)
else:
    from tests.test_parallel import draw, run_jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_jobs(draw, {"a": 0, "b": 1}, workers=2)
"""


def test_an_interrupt_does_not_wait_for_processes_that_are_starting(tmp_path):
    path, script = tmp_path / "started", tmp_path / "script.py"
    script.write_text(SLOW_TO_START)
    command, environment = (
        [sys.executable, str(script), str(path)],
        {**os.environ, "PYTHONPATH": os.getcwd()},
    )
    parent = subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    while not path.exists():
        assert parent.poll() is None
        time.sleep(0.01)
    os.killpg(parent.pid, signal.SIGINT)
    _, printed = parent.communicate(
        timeout=30
    )  # which also ends when no process writes to the pipe any more
    assert printed.count("Traceback") == 1
    assert printed.endswith("KeyboardInterrupt\n")


def interrupted_while_starting(path):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _deaf_children():
            os.kill(os.getpid(), signal.SIGINT)
            Path(path).write_text("started")
    except KeyboardInterrupt:
        return
    raise AssertionError("the signal was lost")


def test_an_interrupt_while_processes_are_started_is_not_lost(tmp_path):
    path = tmp_path / "started"
    child = forked(interrupted_while_starting, path)
    child.join()
    assert child.exitcode == 0
    assert path.exists(), "the signal waits until they are"


def test_bad_input():
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(ValueError, match="`executor` must run processes"),
    ):
        run_jobs(draw, JOBS, executor=threads)
    with pytest.raises(ValueError, match="`workers` must be at least 0, got -1"):
        run_jobs(draw, JOBS, workers=-1)
