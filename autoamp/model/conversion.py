"""The state that a converted model carries: how it is found, copied and removed.

All of the state stands in the instance's `__dict__`.  The class, the parameters and the
`state_dict` are unchanged.
"""

from __future__ import annotations

import copy
import logging
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from autoamp.capture.alike import STATE
from autoamp.capture.engine import Engine
from autoamp.capture.record import Skipped
from autoamp.model.call.entry import Entry
from autoamp.model.forward import MADE_HERE

logger = logging.getLogger(__name__)

REPLICATE = "_replicate_for_data_parallel"
PICKLE, REDUCE, COPY = "__getstate__", "__reduce_ex__", "__deepcopy__"
SCRIPT = "__prepare_scriptable__"
OUR_ATTRIBUTES = (STATE, REPLICATE, PICKLE, REDUCE, COPY, SCRIPT)
"""The names we set in the `__dict__` of a model, besides methods that compute."""


_REPLACED = (
    "its forward was replaced or deleted after it was converted, so that calls run in "
    "fp32; call autoamp.convert(model) again to convert the new forward"
)


class Watch(ABC):
    """Hears of the calls of the modules in a converted model."""

    @abstractmethod
    def __call__(self, module: nn.Module, is_off: bool) -> None:
        """Hears that `module` is about to be called.

        Args:
            is_off: whether Dynamo is switched off there.
        """

    @abstractmethod
    def over(self, copied: nn.Module) -> None:
        """Has the modules in a copy of the model watched as well."""


class Conversion:
    """The state of one converted model, or of a model that was not converted.

    Attributes:
        call: the entry that the model's calls go through, shared by deep copies; None
            if the model was not converted, or was reverted while a wrapper of the
            user's still held our `forward`.
        methods: names of the methods besides `forward` that we put on the instance.
        replaced: the instance's own attributes that ours have replaced, by name.
        declined: why the model was not converted.
        watch: hears of the calls of the modules in the model; None where nothing does.
    """

    def __init__(
        self,
        call: Entry | None = None,
        replaced: dict[str, Any] | None = None,
        bound: types.MethodType | None = None,
        declined: list[Skipped] | None = None,
        methods: tuple[str, ...] = (),
    ) -> None:
        self.call = call
        self.methods = methods
        self.replaced = replaced or {}
        self.declined = declined or []
        self.watch: Watch | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._bound: weakref.ref[types.MethodType] | None = None
        if bound is not None:
            self.bind(bound)
        CONVERSIONS.add(self)

    @property
    def previous(self) -> Callable[..., Any] | None:
        """The `forward` that another library (accelerate, PEFT) put on the instance.

        Our `forward` calls it.  None where the instance had no `forward` of its own.
        """
        return self.replaced.get("forward")

    @property
    def bound(self) -> types.MethodType | None:
        """Our `forward` on the model; None once it is freed."""
        return self._bound() if self._bound is not None else None

    def bind(self, bound: types.MethodType) -> None:
        """Notes our `forward` by a weak reference, since only the model may hold it.

        An assignment `model.forward = other` takes the model's calls away from us, and
        the only sign of the assignment is that our `forward` is freed.
        """
        this, model = weakref.ref(self), weakref.ref(bound.__self__)

        def gone(_: weakref.ref[types.MethodType]) -> None:
            conversion = this()
            if model() is None:  # it is freed, with all that it holds
                return
            if conversion is not None and conversion.engine is not None:
                conversion.engine.record.note(_REPLACED)

        self._bound = weakref.ref(bound, gone)

    @property
    def root(self) -> nn.Module | None:
        """The converted model that the model is a part of; None for other models."""
        return self._root() if self._root is not None else None

    @root.setter
    def root(self, model: nn.Module | None) -> None:
        self._root = None if model is None else weakref.ref(model)

    @property
    def model(self) -> nn.Module | None:
        """The model whose `forward` is ours; None once it has another."""
        bound = self.bound
        model = None if bound is None else bound.__self__
        return model if isinstance(model, nn.Module) else None

    @property
    def engine(self) -> Engine | None:
        """The engine of the model's graphs and their record; None if declined."""
        return self.call.engine if self.call is not None else None

    @property
    def skipped(self) -> list[Skipped]:
        """The parts that were not converted, with the reasons."""
        return self.declined if self.call is None else self.call.engine.record.skipped

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        copied = Conversion(
            self.call,
            copy.deepcopy(self.replaced, memo),
            copy.deepcopy(self.bound, memo),
            methods=self.methods,
        )
        if self.root is not None:
            copied.root = memo.get(id(self.root))
        return copied


CONVERSIONS: weakref.WeakSet[Conversion] = weakref.WeakSet()
"""The conversions of all models; a model's deep copies share its `call`."""

DECLINED = WeakIdKeyDictionary()
"""Maps models that were not converted to their state, which is not written on them."""


def own_methods(attributes: dict[str, Any], state: Conversion) -> list[str]:
    """Names of our methods that are still in a model's `__dict__`."""
    return [n for n in state.methods if getattr(attributes.get(n), MADE_HERE, False)]


def without_ours(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A copy of `state`, the `__dict__` of `model`, as it was before `install`."""
    kept = {k: v for k, v in state.items() if k not in OUR_ATTRIBUTES}
    conversion = model.__dict__.get(STATE)
    if not isinstance(conversion, Conversion):
        return kept
    kept |= {k: v for k, v in conversion.replaced.items() if k in OUR_ATTRIBUTES}
    if conversion.bound is None:
        return kept
    for name in own_methods(kept, conversion):
        del kept[name]
    if kept.get("forward") == conversion.bound:
        del kept["forward"]
        if conversion.previous is not None:
            kept["forward"] = conversion.previous
    return kept


def uninstall(model: nn.Module) -> None:
    """Takes everything that `install` has put on the instance away again."""
    plain = without_ours(model.__dict__, model)
    model.__dict__.clear()
    model.__dict__.update(plain)


def disown(model: nn.Module) -> None:
    """Takes away from a model the conversion of another model.

    `copy.__dict__.update(model.__dict__)` gives the copy a `forward` that is bound to
    the original.
    """
    state = model.__dict__.get(STATE)
    bound = state.bound if isinstance(state, Conversion) else None
    if bound is not None and bound.__self__ is not model:
        uninstall(model)


def models_of(engine: Engine) -> list[nn.Module]:
    """The models whose calls go through `engine`: one model and its deep copies."""
    states = [each for each in list(CONVERSIONS) if each.engine is engine]
    found = [each.model for each in states if each.root is None]
    return [model for model in found if model is not None]


def conversion_of(model: Any) -> Conversion | None:
    """The state of `model`, even if it was not converted; None if nobody tried."""
    if not isinstance(model, nn.Module):
        return None
    model = inside_wrappers(model)
    state = model.__dict__.get(STATE)
    if not isinstance(state, Conversion) or state.call is None:
        state = DECLINED.get(model) if DECLINED else None
    return state if isinstance(state, Conversion) else None


def inside_wrappers(model: Any) -> Any:
    """The module that `DistributedDataParallel` or `DataParallel` calls, or `model`.

    The wrappers' own `forward` cannot be converted: Dynamo steps aside from it.
    """
    while isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model
