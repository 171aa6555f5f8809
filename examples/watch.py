"""Train the reference classifier from a YAML file that lists the callbacks.

``python examples/watch.py fit --config examples/watch.yaml``, and for instance
``--trainer.callbacks+=lightning_taskinfo.LocalMinimum --trainer.callbacks.every_n_epochs=5`` to watch more.
"""

from pytorch_lightning.cli import LightningCLI
from reference import ArrayDataModule, Classifier

from lightning_taskinfo.data import load_dataset


class Digits(ArrayDataModule):
    """Handwritten digits of 8×8 pixels.

    Args:
        batch_size: Samples in a batch.
    """

    def __init__(self, batch_size: int = 64):
        super().__init__(load_dataset("digits", size=8), batch_size=batch_size)


class DigitClassifier(Classifier):
    """The reference classifier for them.

    Args:
        width: Channels of the first convolution.
        lr: Learning rate.
    """

    def __init__(self, width: int = 16, lr: float = 1e-3):
        super().__init__((1, 8, 8), 10, width=width, lr=lr)


if __name__ == "__main__":
    LightningCLI(DigitClassifier, Digits, save_config_callback=None)
