"""Before a model is loaded, raises an error if transformers or TRL lacks functions that isotype calls or overrides."""

import logging
from collections.abc import Iterable
from importlib.metadata import version

from packaging.version import Version

from isotype.compat import transformers as trainer_steps
from isotype.compat import trl as trl_head
from isotype.core import VERSION
from isotype.core.errors import Problem, UsageError
from isotype.data.methods import Method
from isotype.precision.versions import installed

logger = logging.getLogger("isotype")

LAST_TESTED = {
    "torch": "2.15",
    "transformers": "5.24",
    "trl": "1.16",
    "accelerate": "1.15",
    "bitsandbytes": "0.50",
}
"""The newest version of each library with which all entries of docs/compat.md were tested."""


def require_fitting_libraries() -> None:
    """Log libraries that are newer than `LAST_TESTED`. Raise UsageError if transformers or TRL lacks a needed function."""
    import trl.trainer.utils
    from transformers import Trainer

    for line in newer_than_tested():
        logger.warning("%s", line)
    of_trl = (*trl_head.incompatibilities(trl.trainer.utils), *trl_head.lacking_inside())
    _refuse(transformers=trainer_steps.incompatibilities(Trainer), trl=of_trl)


def require_names(method: Method) -> None:
    config = f"{method.trainer.removesuffix('Trainer')}Config"
    _refuse(trl=trl_head.lacking((method.trainer, config)))


def _refuse(**incompatibilities: Iterable[str]) -> None:
    problems = [
        Problem(
            f"{library} {version(library)} under isotype {VERSION}: {reason}",
            f"{library} {LAST_TESTED[library]}, with which isotype was tested",
            f"pip install '{library}=={LAST_TESTED[library]}.*', or install a newer isotype",
        )
        for library, reasons in incompatibilities.items()
        for reason in reasons
    ]
    if problems:
        raise UsageError("a library lacks functions that isotype needs", problems)


def newer_than_tested() -> list[str]:
    return [
        f"{library} {here} is newer than {last}, the newest version tested with isotype {VERSION}"
        for library, last in LAST_TESTED.items()
        if (here := installed().get(library)) and Version(here).release[:2] > Version(last).release[:2]
    ]
