"""Which setting to speculate with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.setting import Setting


class Controller:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def setting(self, sequences: int) -> Setting:
        """What to do while so many sequences run."""
        return self._setting
