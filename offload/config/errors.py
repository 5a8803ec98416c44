"""The one exception of the configuration: every problem found, one line each."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration that cannot be used.

    ``problems`` holds one line per problem: dotted key, value, what is legal. ``str()`` joins them with line breaks.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)
