"""PAC-Bayes certificates for networks that were simply trained: ``certify(model, data, prior)``."""

from lightning_taskinfo.certificates.certificate import Certificate, NetworkBound, TestSetBound
from lightning_taskinfo.certificates.certify import certify
from lightning_taskinfo.certificates.prior import PRIOR_STDS, Prior
from lightning_taskinfo.certificates.search import BETAS, Structure
from lightning_taskinfo.certificates.subject import zero_one_loss

__all__ = [
    "BETAS",
    "PRIOR_STDS",
    "Certificate",
    "NetworkBound",
    "Prior",
    "Structure",
    "TestSetBound",
    "certify",
    "zero_one_loss",
]
