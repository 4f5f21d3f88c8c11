"""Edits that are data: checked against this engine's model, then installed like any other."""

from __future__ import annotations

from collections.abc import Sequence

from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.blocks.reach import touch_of_steps
from nnsight_lab.engine.edits import Edit, EditVersion
from nnsight_lab.engine.service import EngineService
from nnsight_lab.steps.check import fitted
from nnsight_lab.steps.step import Step
from nnsight_lab.wire.keys import DECLARE


class Declaring(EngineService):
    """An engine that takes edits as steps."""

    def install_declared(self, name: str | None, steps: Sequence[Step]) -> Edit:
        """Install steps as the next version of an edit.

        Raises:
            EditRefused: They are none, or do not fit the model.
        """
        __tracebackhide__ = True
        edit, version = self._declared(name, steps)
        for method, args in self.edits.install_steps(edit, version, version.source):
            self.rpc(method, *args)
        return edit

    async def ainstall_declared(self, name: str | None, steps: Sequence[Step]) -> Edit:
        """`install_declared`, awaited."""
        __tracebackhide__ = True
        edit, version = self._declared(name, steps)
        for method, args in self.edits.install_steps(edit, version, version.source):
            await self.arpc(method, *args)
        return edit

    def _declared(self, name: str | None, steps: Sequence[Step]) -> tuple[Edit, EditVersion]:
        __tracebackhide__ = True
        edit = self.edits.declared(name)
        named = self.model._module.named_modules(remove_duplicate=False)
        modules = {path: type(one).__name__ for path, one in named}
        facts = self.facts()
        fit = fitted(steps, modules, layers=facts.layers, hidden=facts.hidden)
        block = DeclaredBlock.of("steps", {"steps": fit})
        source, payload = "\n".join(map(str, fit)), block.dumps()
        touch = touch_of_steps(fit, payload)
        return edit, EditVersion(edit.name, payload, source, method=DECLARE, touch=touch)
