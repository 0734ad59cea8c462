"""autoamp where trainers look for it: a callback, a precision plugin and a model hook.

Each takes the options of `convert` and does no more than `convert` or `enable` does.
The trainer's own mixed precision stays off; it must be off, since autoamp leaves the
calls in a script's own autocast alone.  The libraries are imported when they are asked
for.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from autoamp.api import convert, is_converted, revert
from autoamp.auto.switch import disable, enable, is_enabled
from autoamp.errors import OptionError
from autoamp.training.options import ConvertOptions, Options

if TYPE_CHECKING:
    from torch import nn


def transformers_callback(**options: Unpack[ConvertOptions]) -> Any:
    """A callback that converts the model of Hugging Face's `Trainer`.

    The model is converted when the trainer is made, and a model of `model_init` when
    its training begins.  Evaluation and prediction run converted as well.

    Args:
        **options: as for `convert`.

    Returns:
        A `transformers.TrainerCallback`.

    Raises:
        AutoampError: an option cannot be used; and, when the trainer is made,
            `TrainingArguments` has `bf16=True` or `fp16=True`.

    Example:
        >>> from autoamp.trainers import transformers_callback
        >>> callback = transformers_callback(precision="bf16")
        >>> # Trainer(model, args, train_dataset=data, callbacks=[callback])
    """
    base: Any = import_module("transformers").TrainerCallback
    Options().replace(**options)

    class Callback(base):  # type: ignore[misc]
        def on_init_end(
            self, args: Any, _: Any, __: Any, model: Any = None, **___: Any
        ) -> None:
            asked = [name for name in ("bf16", "fp16") if getattr(args, name)]
            if asked:
                raise OptionError(
                    f"TrainingArguments({asked[0]}=True) switches on the trainer's own "
                    f"autocast, in which autoamp leaves the model alone; leave "
                    f"{asked[0]} out"
                )
            if model is not None and not is_converted(model):
                convert(model, **options)

        on_train_begin = on_init_end

        def __reduce__(self) -> Any:
            return partial(transformers_callback, **options), ()

    return Callback()


def lightning_precision(*, hot: bool = True, **options: Unpack[ConvertOptions]) -> Any:
    """A precision plugin of Lightning's `Trainer`, with which it runs mixed.

    The automatic mode is on from the start of `fit`, `validate`, `test` or `predict` to
    its end, so that it does not matter which modules the steps of a LightningModule
    call.  Afterwards the modules run in fp32.

    Args:
        hot, options: as for `enable`.

    Returns:
        A plugin that both `pytorch_lightning` and `lightning.pytorch` take, where both
        are imported.

    Raises:
        AutoampError: an option cannot be used.
        ImportError: Lightning is not installed.

    Example:
        >>> from autoamp.trainers import lightning_precision
        >>> plugin = lightning_precision(precision="bf16")
        >>> # Trainer(plugins=[plugin])
    """
    Options().replace(**options)

    class Precision(*_lightning_bases()):  # type: ignore[misc]
        on = False

        def convert_module(self, module: nn.Module) -> nn.Module:
            if not is_enabled():  # a mode that the script has on keeps its own options
                enable(hot=hot, **options)
                self.on = True
            return module

        def teardown(self) -> None:
            if self.on:
                disable()
                self.on = False

        def __reduce__(self) -> Any:
            return partial(lightning_precision, hot=hot, **options), ()

    return Precision()


def _lightning_bases() -> tuple[type, ...]:
    """`Precision` of each of Lightning's two packages that the process has imported."""
    names = ("pytorch_lightning", "lightning.pytorch")
    imported = [name for name in names if name in sys.modules]
    if not imported:
        for name in names:
            try:
                import_module(name)
            except ImportError:
                continue
            imported.append(name)
            break
        else:
            raise ImportError("neither pytorch_lightning nor lightning is installed")
    plugins = [import_module(f"{name}.plugins.precision") for name in imported]
    return tuple(plugin.Precision for plugin in plugins)


def accelerate_hook(**options: Unpack[ConvertOptions]) -> Any:
    """A hook of accelerate that converts the model it is added to, at its first call.

    `remove_hook_from_module` reverts the model.

    Args:
        **options: as for `convert`.

    Returns:
        An `accelerate.hooks.ModelHook`, for one model.

    Raises:
        AutoampError: an option cannot be used.

    Example:
        >>> import torch
        >>> from accelerate.hooks import add_hook_to_module
        >>> from autoamp.trainers import accelerate_hook
        >>> hook = accelerate_hook(precision="bf16", do_no_harm=False)
        >>> model = add_hook_to_module(torch.nn.Linear(8, 8), hook)
        >>> y = model(torch.ones(4, 8))
        >>> autoamp.is_converted(model)
        True
    """
    try:
        base: Any = import_module("accelerate.hooks").ModelHook
    except ImportError:
        missing = "accelerate is not installed (pip install accelerate)"
        raise ImportError(missing) from None
    Options().replace(**options)

    class Hook(base):  # type: ignore[misc]
        waits = True

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.waits:
                # Not in `init_hook`, after which accelerate replaces `forward`.
                self.waits = False
                plain = module._old_forward
                converted = convert(module, **options).forward

                def this_call(*args: Any, **kwargs: Any) -> Any:
                    module._old_forward = plain
                    return converted(*args, **kwargs)

                module._old_forward = this_call
            return args, kwargs

        def detach_hook(self, module: nn.Module) -> nn.Module:
            return revert(module)

        def __reduce__(self) -> Any:
            return partial(accelerate_hook, **options), ()

    return Hook()
