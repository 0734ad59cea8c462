"""Keeps messages of Dynamo from users who did not ask for them."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A region in which Dynamo's messages reach only those who asked for them."""
    with warnings.catch_warnings():
        # Advice to those who write extensions of torch: a list's own `append` is none.
        warnings.filterwarnings("ignore", r"\s*Dynamo does not know how to trace the b")
        # Dynamo looks at `.grad` of every input and hides the warning, but not from a
        # filter that makes the warning an error, and the error would end the capture.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        for logger in _LOGGERS:
            logger.addFilter(_is_worth_saying)
        try:
            yield
        finally:
            for logger in _LOGGERS:
                logger.removeFilter(_is_worth_saying)


_LOGGERS = [
    logging.getLogger(f"torch.{name}")
    for name in (
        "_dynamo.convert_frame",
        "_dynamo.variables.tensor",
        "_subclasses.fake_tensor",
    )
]

_PAGES = (
    "Graph break from `Tensor.item()`",
    "WON'T CONVERT",
    "failed while attempting to run meta",
    "fake tensor raised TypeError",
    "torch._dynamo hit config.",
)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Whether a message of Dynamo is for a user who did not ask for messages.

    Advice against a graph break at `.item()`, with a page of stack, is not, and a limit
    on graphs is said by ourselves.  Neither is
    a failure of Dynamo, with three, or of an op on fake tensors, with eight: the report
    says which code is left to Python, and an error of the model's own (a wrong shape,
    say) is raised by the model's own code.
    """
    if logging.getLogger(record.name).isEnabledFor(logging.INFO):
        return True  # asked for, by TORCH_LOGS
    return not any(page in str(record.msg) for page in _PAGES)
