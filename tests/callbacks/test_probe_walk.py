"""The way of one measurement stays short: few files, few crossings between base and subclass, one look at the model."""

import re
import sys
from pathlib import Path

from torch.utils.data import DataLoader

import lightning_taskinfo
from lightning_taskinfo.callbacks import FisherTrace
from tests.callbacks.runs import Classifier, digits, fit

PACKAGE = Path(lightning_taskinfo.__file__).parent


class Walk(FisherTrace):
    """Notes which functions of the package its last measurement calls, and from where."""

    def _measure(self):
        self.calls = []
        before = sys.getprofile()
        sys.setprofile(self.note)
        try:
            return super()._measure()
        finally:
            sys.setprofile(before)

    def note(self, frame, event, argument):
        if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents:
            code, caller = frame.f_code, frame.f_back.f_code
            self.calls.append((caller.co_filename, code.co_filename, code.co_name))


def test_one_measurement(tmp_path):
    callback = Walk(every_n_steps=1)
    fit(
        tmp_path,
        callback,
        model=Classifier,
        loader=DataLoader(digits(), batch_size=8),
        max_epochs=1,
    )
    files = {Path(file).relative_to(PACKAGE).as_posix() for _, file, _ in callback.calls}
    ours = {file for file in files if file.startswith("callbacks/")}
    assert ours == {f"callbacks/{n}.py" for n in ("fisher_trace", "probe", "source")}
    drawn = (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("**Watch**")[2]
    measured = {file for file in files if file.startswith("fisher/")}
    assert measured == {*re.findall(r"fisher/\w+\.py", drawn.partition("\n**")[0])}
    pair = {str(PACKAGE / "callbacks" / name) for name in ("probe.py", "fisher_trace.py")}
    crossings = [name for caller, file, name in callback.calls if {caller, file} == pair]
    assert crossings == ["observe", "summarise"]
    entered = [name for _, _, name in callback.calls if name == "keep_random_states"]
    assert len(entered) == 1, "what `observing` does when it is entered"
