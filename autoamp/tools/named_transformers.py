"""Models of transformers by name: a configuration, a type of model, a config.json."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoamp.errors import OptionError
from autoamp.messages import bytes_text, class_name, error_line
from autoamp.passes.decide.devices import available
from autoamp.runtime.stand_in import Call

LIBRARY = "transformers"
_LONGEST = 1024
_FACTORY = (
    "write a function that returns (model, args) and give its name, MODULE:FACTORY, or "
    "call autoamp.explain(model, *args)"
)
_HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""The tables of heads; the first table that knows a configuration gives the head."""


def names_a_model(name: str) -> bool:
    """Whether a name is for `named_model`, not a MODULE:FACTORY."""
    return name.startswith(f"{LIBRARY}:") or name.endswith(".json")


def named_model(
    name: str,
    *,
    batch: int = 1,
    sequence: int | None = None,
    trains: bool = True,
    meta: bool = True,
    room: int = 0,
) -> tuple[nn.Module, Call]:
    """The model of a name, in fp32, and a call of it.

    Args:
        meta: whether the model is on the meta device.  Otherwise its weights and its
            inputs are random, the same at each call, and on the GPU if there is one.
        room: tokens that are generated after those of the call.

    Raises:
        OptionError: there is no such model, transformers is not installed, the inputs
            of the model cannot be made from its configuration, or its weights do not
            fit into memory.
    """
    try:
        import transformers
    except ImportError:
        raise OptionError(
            f"{name}: transformers is not installed (pip install transformers)"
        ) from None
    config = (
        _from_file(transformers, name)
        if name.endswith(".json")
        else _from_text(transformers, name.removeprefix(f"{LIBRARY}:"))
    )
    kind = _class_for(transformers, config, name)
    config.dtype = torch.float32  # a config.json may name the dtype of a checkpoint
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def made(device: torch.device) -> nn.Module:
        with device:
            return kind(config).float().train(trains)  # type: ignore[no-any-return]

    try:
        model = made(torch.device("meta"))
        call = _call(model, config, name, batch, sequence, room=room, trains=trains)
        if meta:
            return model, ((), call)
        _refuse_too_large(model, name, here)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = made(here)
            call = {key: _random(each, config) for key, each in call.items()}
    except OptionError:
        raise
    except Exception as error:
        raise OptionError(
            f"{name}: {kind.__name__} cannot be made: {error_line(error)}"
        ) from error
    return model, ((), {key: each.to(here) for key, each in call.items()})


def _refuse_too_large(model: nn.Module, name: str, device: torch.device) -> None:
    """Refuses a model whose weights alone do not fit into the memory that is free."""
    needed = sum(each.numel() * each.itemsize for each in model.parameters())
    free = available(device)
    if free is not None and needed > free:
        smaller = f"transformers:{class_name(model.config)}(num_hidden_layers=2)"
        raise OptionError(
            f"{name} has {bytes_text(needed)} of weights in fp32, and {device.type} "
            f"has {bytes_text(free)} of free memory: name a smaller configuration, as "
            f"{smaller}, or ask `autoamp explain`, which needs no weights"
        )


def _random(zeros: torch.Tensor, config: Any) -> torch.Tensor:
    """Random numbers of the shape and kind of an input: tokens, labels or pixels."""
    if zeros.is_floating_point():
        return torch.randn(zeros.shape, dtype=torch.float32, device="cpu")
    is_text = zeros.dim() > 1  # labels of images have one dimension
    source = config.get_text_config() if is_text else config
    count = getattr(source, "vocab_size" if is_text else "num_labels", 2)
    return torch.randint(int(count), zeros.shape, dtype=torch.long, device="cpu")


def _from_text(library: Any, text: str) -> Any:
    """The configuration of "LlamaConfig(hidden_size=64)" or of "llama"."""
    called, arguments = _parsed(text)
    if called.endswith("Config"):
        kind = getattr(library, called, None)
        if not _is_class(kind, library.PreTrainedConfig):
            near = _nearest(called, [n for n in dir(library) if n.endswith("Config")])
            raise OptionError(f"transformers has no configuration {called}{near}")
    elif called in library.CONFIG_MAPPING:
        kind = library.CONFIG_MAPPING[called]
    else:
        raise OptionError(
            f"transformers has no type of model {called!r}"
            f"{_nearest(called, [*library.CONFIG_MAPPING])}; give a type such as gpt2, "
            "or one of its configurations, such as LlamaConfig()"
        )
    config = _made(kind, arguments, text)
    _refuse_unknown(config, arguments, text)
    return config


def _refuse_unknown(
    config: Any, arguments: dict[str, Any], text: str, within: Any = None
) -> None:
    """Refuses names that transformers stores and no configuration has by default.

    The names in a config.json are not asked, because checkpoints hold many of their own
    that mean nothing to the model.

    Args:
        within: the same part of the default configuration around `config`.

    Raises:
        OptionError: there is such a name in a configuration, or in one inside it.
    """
    kind, settings = type(config), vars(config)
    names = {*inspect.signature(kind.__init__).parameters, *kind.attribute_map}
    names |= {*kind.sub_configs}
    plain = None
    with contextlib.suppress(Exception):  # some configurations have no defaults
        plain = kind()
    names |= settings.keys() - arguments.keys() if plain is None else vars(plain).keys()
    for name, value in arguments.items():
        there = name in names or hasattr(plain, name) or hasattr(within, name)
        if name in settings and not there:
            near = _nearest(name, [each for each in names if each[0] != "_"])
            raise OptionError(f"{text}: {class_name(config)} has no {name}{near}")
        if isinstance(value, dict) and hasattr(settings.get(name), "sub_configs"):
            _refuse_unknown(settings[name], value, text, getattr(plain, name, None))


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _is_class(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """A name, and the literal keyword arguments after it; nothing is evaluated."""
    if "(" not in text:
        return text.strip(), {}  # a type of model may hold a "-"
    try:
        tree: Any = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        tree = None
    is_call = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
    if not is_call or tree.args or not all(each.arg for each in tree.keywords):
        raise OptionError(
            f"{text!r}: write a name, or a name with keywords, as LlamaConfig(a=1)"
        )
    values = {}
    for each in tree.keywords:
        try:
            values[each.arg] = ast.literal_eval(each.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise OptionError(
                f"{text!r}: {each.arg}={ast.unparse(each.value)} is no literal: give a "
                "number, a string, True, False, None, or a list or dict of literals"
            ) from None
    return tree.func.id, values


def _from_file(library: Any, path: str) -> Any:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{path} is no JSON: {error}") from None
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply to be read") from None
    kind = data.get("model_type") if isinstance(data, dict) else None
    if kind not in library.CONFIG_MAPPING:
        raise OptionError(
            f"{path}: model_type is {kind!r}, which transformers "
            f"{library.__version__} does not know; {_FACTORY}"
        )
    rest = {key: value for key, value in data.items() if key != "model_type"}
    rest.pop("quantization_config", None)  # the model is made in fp32
    return _made(library.CONFIG_MAPPING[kind], rest, path)


def _made(kind: Any, arguments: dict[str, Any], name: str) -> Any:
    try:
        return kind(**arguments)
    except Exception as error:
        raise OptionError(
            f"{name}: {kind.__name__} refuses these arguments: {error_line(error)}"
        ) from error


def _class_for(library: Any, config: Any, name: str) -> Any:
    """The class that a configuration names, or the first head that fits."""
    for each in config.architectures or ():
        kind = getattr(library, each, None)
        if _is_class(kind, nn.Module):
            return kind
    for table in _HEADS:
        mapping = getattr(library, table, {})
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    raise OptionError(
        f"{name}: transformers has no model for {class_name(config)}; {_FACTORY}"
    )


def _call(
    model: Any,
    config: Any,
    name: str,
    batch: int,
    sequence: int | None,
    *,
    room: int,
    trains: bool,
) -> dict[str, Any]:
    """The keyword arguments of a call; with labels if the head computes a loss."""
    main, side = model.main_input_name, getattr(config, "image_size", None)
    if main == "input_ids":
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        most = (longest or _LONGEST + room) - room
        if most < (sequence or 1):
            raise OptionError(
                f"{name} takes at most {longest} tokens, and {room} are generated: "
                "give a shorter sequence, or generate fewer"
            )
        length = sequence or min(most, _LONGEST)
        ids = torch.zeros(batch, length, dtype=torch.long, device="cpu")
        call, labels = {"input_ids": ids}, torch.zeros_like(ids)
        if getattr(config, "is_encoder_decoder", False):
            call["decoder_input_ids"] = torch.zeros_like(ids)
    elif main == "pixel_values" and isinstance(side, int):
        if sequence is not None:
            raise OptionError(
                f"{name}: {class_name(model)} takes images; leave out the sequence"
            )
        shape = batch, getattr(config, "num_channels", 3), side, side
        call = {main: torch.zeros(shape, dtype=torch.float32, device="cpu")}
        labels = torch.zeros(batch, dtype=torch.long, device="cpu")
    else:
        raise OptionError(
            f"{name}: {class_name(model)} takes {main}, whose shape is not in its "
            f"configuration; {_FACTORY}"
        )
    labelled = "labels" in inspect.signature(model.forward).parameters
    return {**call, "labels": labels} if labelled and trains else call
