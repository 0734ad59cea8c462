"""From the source to the index of errors, as Markdown: classes, messages, what to do.

The source is read and not imported, so that each message is found where it is made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TO_DO = {
    "AutoampError": "`except autoamp.AutoampError` catches every error of this page.",
    "OptionError": "Give a value that the message names; [Python](api.md) and [the "
    "command line](command-line.md) have every option.",
    "RulesError": "`autoamp rules check FILE` prints each fault of a file with its "
    "line; [Rules files](rules.md) describes the form.",
    "UnsupportedModelError": "Give the `torch.nn.Module` itself, in fp32 and with real "
    "weights. A model that arrives in half precision needs [its optimizer beside it]("
    "loss-scaling.md#a-model-that-arrives-in-half-precision).",
    "CaptureError": "Change the line that the message names, or leave `strict=True` "
    "out: then `torch.autocast` or fp32 [stands in]("
    "details.md#code-that-dynamo-does-not-capture).",
    "PlacementError": "Take one rule of the chain away: the message names each `keep=`,"
    " `allow=`, `deny=` or rules file that it comes from.",
    "VerificationError": "A fault of autoamp, not of your model: please report the "
    "message. Without `strict=True` the ops that it names [run in fp32]("
    "details.md#a-failed-check-costs-a-region).",
    "PassError": "A fault of autoamp, as `VerificationError`: please report it.",
    "ExportError": "Change the model or the target as the message says, and export a "
    "file anew that was changed or cut.",
    "LossScaleError": "Give a number in the range that the message names. Where the "
    "scale reached `min_scale`, [find the op](overflow.md) that overflows.",
    "RankError": "Give `convert` the same model and options on every rank. If a rank "
    "does not answer, its own log has the reason.",
    "CheckpointError": "Load the state into the optimizer that it was saved from, over "
    "the same parameters in the same order.",
}
"""What a user does about each class of errors."""

GAP = "\u2026"
"""Stands in a message for a part that differs from call to call."""


def index(root: Path) -> str:
    """The page: a heading for each class of `autoamp/errors.py`, with its messages."""
    errors = ast.parse((root / "autoamp" / "errors.py").read_text("utf-8"))
    classes = [node for node in errors.body if isinstance(node, ast.ClassDef)]
    made = messages(root, {each.name for each in classes})
    intro = (
        "# Errors\n\nEach class that autoamp raises, its messages and what to do. "
        f"`<name>` and `{GAP}` stand for what differs from call to call."
    )
    return "\n\n".join([intro, *(_section(each, made[each.name]) for each in classes)])


def messages(root: Path, names: set[str]) -> dict[str, dict[str, str]]:
    """For each class of `names` its messages, each with the file that makes it."""
    files = sorted((root / "autoamp").rglob("*.py"))
    modules = {path: ast.parse(path.read_text("utf-8")) for path in files}
    functions = {
        node.name: (module, node)
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.FunctionDef)
    }
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for path, module in modules.items():
        for function, call in _calls(module, module):
            if isinstance(call.func, ast.Name) and call.func.id in names and call.args:
                for text in _Reader(functions, module, function).texts(call.args[0]):
                    words = " ".join(text.split())
                    if words.strip(f"{GAP} :;,."):
                        place = path.relative_to(root).as_posix()
                        found[call.func.id].setdefault(words, place)
    return found


def _section(error: ast.ClassDef, made: dict[str, str]) -> str:
    """The part of the page about one class."""
    also = [base.id for base in error.bases if isinstance(base, ast.Name)][1:]
    summary = (ast.get_docstring(error) or "").partition("\n\n")[0]
    kind = f" It is a `{also[0]}` too." if also else ""
    todo = f"**What to do:** {TO_DO[error.name]}"
    parts = [f"## {error.name}", f"{summary}{kind}", todo]
    places: dict[str, list[str]] = {}
    for text, place in made.items():
        places.setdefault(place, []).append(f"- `` {text} ``")
    parts += [f"In `{place}`:\n\n" + "\n".join(places[place]) for place in places]
    return "\n\n".join(parts)


def _calls(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Each call, with the function or module that it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        yield from _calls(
            child, child if isinstance(child, ast.FunctionDef) else function
        )


class _Reader:
    """Reads the texts that an expression may have, in one function of a module."""

    def __init__(
        self,
        functions: dict[str, tuple[ast.Module, ast.FunctionDef]],
        module: ast.Module,
        function: ast.AST,
        inside: frozenset[str] = frozenset(),
    ) -> None:
        """Args: `functions` of the package; `inside`, the names that lead here."""
        self._functions = functions
        self._inside = inside
        self._values: dict[str, list[ast.expr]] = {}
        for each in [*module.body, *ast.walk(function)]:
            match each:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._values.setdefault(name, []).append(value)
                case ast.NamedExpr(target=ast.Name(id=name), value=value):
                    self._values.setdefault(name, []).append(value)
        self._module, self._function = module, function

    def texts(self, node: ast.expr) -> list[str]:
        """Every text that `node` may have; a part that is not known is `GAP`."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(self._part(part) for part in parts)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [a + b for a in self.texts(left) for b in self.texts(right)]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.texts(body), *self.texts(orelse)]
            case ast.Call(func=ast.Attribute(value=text, attr="format")):
                return [each.replace("{}", GAP) for each in self.texts(text)]
            case ast.Name(id=name) if name in self._values and name not in self._inside:
                reader = self._within(name, self._module, self._function)
                return [t for each in self._values[name] for t in reader.texts(each)]
            case ast.Call(func=ast.Name(id=name)) if (
                name in self._functions and name not in self._inside
            ):
                module, function = self._functions[name]
                reader = self._within(name, module, function)
                given = [
                    n.value for n in ast.walk(function) if isinstance(n, ast.Return)
                ]
                return [t for each in given if each for t in reader.texts(each)]
        return [GAP]

    def _within(self, name: str, module: ast.Module, function: ast.AST) -> _Reader:
        return _Reader(self._functions, module, function, self._inside | {name})

    def _part(self, node: ast.expr) -> str:
        """The text of one part of an f-string, or a word in its place."""
        if not isinstance(node, ast.FormattedValue):
            return self.texts(node)[0]
        known = self.texts(node.value)
        if len(known) == 1 and GAP not in known[0]:
            return known[0]
        match node.value:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name.isalpha():
                return f"<{name}>"
        return GAP
