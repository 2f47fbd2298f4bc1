"""Where the package asks the device to keep an order: found in its syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import streamloader

__all__ = ["SITES", "Site", "sites"]

ROOT = Path(streamloader.__file__).parent
VERBS = ("wait", "record", "uses", "done", "join")


class Site(NamedTuple):
    """One place where the package uses a verb.

    Attributes:
        module: The file, without its suffix.
        function: The function around it.
        verb: Which.
        lines: From the first to the last.
        via: The function that calls the one around it, where there are several.
    """

    module: str
    function: str
    verb: str
    lines: tuple[int, int]
    via: str = ""

    @property
    def name(self) -> str:
        """As in `stages._enter.wait<hand_over`."""
        return f"{self.module}.{self.function}.{self.verb}" + (f"<{self.via}" if self.via else "")

    def skip(self, verb: str, frame: FrameType) -> bool:
        """Whether it is this call."""
        code, outer = frame.f_code, frame
        while outer.f_code.co_name.startswith("<") and outer.f_back is not None:
            outer = outer.f_back  # a comprehension's frame
        return (
            verb == self.verb
            and Path(code.co_filename) == ROOT / f"{self.module}.py"
            and self.lines[0] <= frame.f_lineno <= self.lines[1]
            and (not self.via or self.via == _name(outer.f_back))
        )


def _name(frame: FrameType | None) -> str:
    return "" if frame is None else frame.f_code.co_name


def sites(source: str, module: str) -> list[Site]:
    """The uses of a device's verbs in a module, also where one is not called but passed on.

    A private function that is called in several others is one site for each of them; what is passed
    on to a finaliser is called by that one's `__call__`.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    callers = _callers(functions)
    found = []
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in VERBS and _is_device(node.value):
                lines = (node.lineno, node.end_lineno or node.lineno)
                private = function.name.startswith("_")
                several = callers.get(function.name, []) if private else []
                vias = several if len(several) > 1 else [""]
                found += [Site(module, function.name, node.attr, lines, via) for via in vias]
    return found


def _callers(functions: list[ast.FunctionDef]) -> dict[str, list[str]]:
    """For each name, the functions that call it, `__call__` for those that pass it on."""
    callers: dict[str, list[str]] = {}
    for function in functions:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in calls:
            callers.setdefault(_last(call.func), []).append(function.name)
            for argument in call.args:
                callers.setdefault(_last(argument), []).append("__call__")
    return {name: list(dict.fromkeys(found)) for name, found in callers.items()}


def _last(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_device(node: ast.expr) -> bool:
    return _last(node).strip("_") == "device"


def package_sites() -> list[Site]:
    """Those of every module but the seam and the fakes."""
    fakes = ("testing", "checker", "ledger")
    modules = [path for path in sorted(ROOT.glob("*.py")) if path.stem not in fakes]
    return [site for path in modules for site in sites(path.read_text("utf-8"), path.stem)]


SITES = {site.name: site for site in package_sites()}
