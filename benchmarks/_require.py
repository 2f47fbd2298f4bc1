"""What the benchmarks need beside the package."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require"]


def require(name: str) -> Any:
    """The module `name`.

    Raises:
        SystemExit: It is not installed; the message says what to install.
        ModuleNotFoundError: It is, but lacks something itself.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise SystemExit(
            f'this benchmark needs {error.name}: pip install "streamloader[bench]"'
        ) from error
