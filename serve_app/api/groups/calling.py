"""Functions that the model may call."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, InstanceOf

from serve_app.api.forms.form import Parameter
from serve_app.api.forms.shared import FLAG
from serve_app.api.forms.tools import Choice, ToolList
from serve_app.core.tools import Tool, ToolChoice, Tools


class Calling(BaseModel):
    """Tools, and which of them the text calls.

    tool_choice: None is `auto` where there are tools
    parallel_tool_calls: None is what `calls_in_parallel` says
    """

    calls_in_parallel: ClassVar[bool] = False

    tools: Annotated[tuple[InstanceOf[Tool], ...], Parameter(ToolList(), "Functions that the text may call.")] = ()
    tool_choice: Annotated[
        InstanceOf[ToolChoice] | None, Parameter(Choice(), "Whether the text calls a function, and which.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Parameter(FLAG, "Whether one text may hold several calls, as a list.")
    ] = None

    @property
    def tool_use(self) -> Tools:
        """What is to be done with the tools; nothing without any."""
        is_parallel = self.calls_in_parallel if self.parallel_tool_calls is None else self.parallel_tool_calls
        choice = self.tool_choice or ToolChoice(mode="auto")
        return Tools(sent=self.tools, choice=choice, is_parallel=is_parallel) if self.tools else Tools()
