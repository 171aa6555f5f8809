"""Ctrl-C while a transfer trains."""

import signal

import pytest

from lightning_taskinfo.transfer import transfer
from lightning_taskinfo.transfer.training import EpochKeeper
from tests.transfer.tiny import STAGES, tiny_data, tiny_net


def test_an_interrupt_stays_one_and_the_next_is_heard_too(tmp_path, monkeypatch):
    """Lightning would end the process, and ignore Ctrl-C in a notebook ever after."""

    def interrupt(*_):
        raise KeyboardInterrupt

    heard = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(EpochKeeper, "on_train_epoch_end", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            transfer(
                tiny_net, tiny_data(), methods=["standard"], seeds=1, stages=STAGES, folder=tmp_path
            )
        assert signal.getsignal(signal.SIGINT) is heard
    finally:
        signal.signal(signal.SIGINT, heard)
