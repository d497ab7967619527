"""What each node last said, for the page to show: after a sampling, after a reload, and when a run came from the cache.

ComfyUI sends a node's text when the node runs, which is before the sampling, and not again when the node is cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

ROUTE = "/comfy_sage2/node_status"
MOST = 500  # nodes; those that have said nothing for the longest time are forgotten
_LONGEST = 100  # characters of a number that comes with a prompt


Publish = Callable[[str], None]


def workflow_of(extra: object) -> str | None:
    """The id of the workflow in what the page sends with a prompt, or None: a prompt without it comes from no page."""
    workflow = extra.get("workflow") if isinstance(extra, Mapping) else None
    number = workflow.get("id") if isinstance(workflow, Mapping) else None
    return number if isinstance(number, str) and len(number) <= _LONGEST else None


class NodeStatus:
    """The last text of each node of each workflow; several threads may write and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()

    def publisher(self, kind: str, node: object, extra: object) -> Publish:
        """A function that keeps what a node of class `kind` says.

        node: its number in the prompt. extra: what the page sends with the prompt, with the workflow in it; a prompt
        without one comes from no page, and nothing is kept.
        """
        number = workflow_of(extra)
        if number is None or not isinstance(node, str) or len(node) > _LONGEST:
            return lambda text: None

        def publish(text: str) -> None:
            entry = {"workflow": number, "node": node, "type": kind, "text": text}
            with self._lock:
                self._texts.pop((number, node), None)
                self._texts[number, node] = entry
                while len(self._texts) > MOST:
                    self._texts.popitem(last=False)

        return publish

    def of_workflow(self, workflow: str) -> list[dict[str, str]]:
        """What the nodes of a workflow have said."""
        with self._lock:
            return [dict(entry) for (number, _), entry in self._texts.items() if number == workflow]


node_status = NodeStatus()


def add_route() -> None:
    """Have ComfyUI's server answer a page that asks for the texts of a workflow."""
    from aiohttp import web
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:  # a program that only uses the nodes
        return

    async def answer(request: Any) -> Any:
        return web.json_response(node_status.of_workflow(request.query.get("workflow", "")))

    server.routes.get(ROUTE)(answer)
