"""Modules whose results are no model's: weights, and figures of a metric.

The automatic mode asks it while no model is hot: only torch is imported here.
"""

from __future__ import annotations

from torch.nn.utils.parametrize import ParametrizationList


def is_no_model(called: object) -> bool:
    """Whether the results of an object's calls are weights, or the figures of a metric.

    A script that reads a parametrised weight calls the list of its parametrisations.
    Such results are read in full precision.  A library's metric need be no module.
    """
    measures = ("ignite", "torcheval", "torchmetrics")
    return isinstance(called, ParametrizationList) or any(
        base.__name__ == "Metric" and base.__module__.partition(".")[0] in measures
        for base in type(called).__mro__
    )
