"""Names of an earlier release: each works for one more release, with a DeprecationWarning that names the new one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn the caller of the function that calls this."""
    warnings.warn(f"{old} is deprecated, {new} is its name from the next release on", DeprecationWarning, stacklevel)


def renamed_argument(old: str, new: str) -> Callable[[F], F]:
    """Accept a keyword argument under its old name as well. Both at once are a TypeError."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if old in keywords:
                if new in keywords:
                    raise TypeError(f"{function.__name__}: got {old} and {new}, expected {new} alone")
                warn_renamed(f"{function.__name__}({old}=...)", new)
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return cast(F, call)

    return decorated


def renamed_names(old_module: str, module: ModuleType, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that returns the attributes of `module` under the old names that `names` maps."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {old_module!r} has no attribute {name!r}")
        warn_renamed(f"{old_module}.{name}", f"{module.__name__}.{names[name]}")
        return getattr(module, names[name])

    return find
