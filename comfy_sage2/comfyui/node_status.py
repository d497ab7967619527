"""The last status of each node: sent to the page at once, and kept for a page that loads later.

ComfyUI sends a node's output only when the node runs, which is before the sampling, and not again while it is cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

ROUTE = "/comfy_sage2/node_status"
EVENT = "comfy_sage2.status"
REPORT = "SageAttention2Report"
GOOD, PLAIN, WARNING = "good", "plain", "warning"
MOST = 500  # nodes; those with the oldest status are dropped
_MAX_ID = 100  # characters of an id that comes with a prompt


class Badge(NamedTuple):
    """A few words in a node's title, and their color: GOOD, PLAIN or WARNING."""

    badge: str
    tone: str = PLAIN


EARLIER = Badge("from an earlier run", WARNING)

Entry = dict[str, str | None]


class NodeStatus:
    """The last status of each node of each workflow; several threads may write and read."""

    def __init__(self, send: Callable[[Entry], None] = lambda entry: None) -> None:
        """send: takes each entry that a page is to show."""
        self.send = send
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()

    def publish(self, kind: str, node: object, extra: object, run: str | None, text: str, badge: Badge) -> None:
        """Keep and send a node's status, unless `extra`, which a page sends with a prompt, names no workflow.

        kind, node: the class and the id of the node. run: the id in ComfyUI's queue. text: sentences, or empty.
        """
        sent = extra.get("workflow") if isinstance(extra, Mapping) else None
        workflow = sent.get("id") if isinstance(sent, Mapping) else None
        if not (isinstance(workflow, str) and isinstance(node, str) and max(len(workflow), len(node)) <= _MAX_ID):
            return
        entry: Entry = {"workflow": workflow, "node": node, "type": kind, "run": run, "text": text}
        entry |= badge._asdict()
        with self._lock:
            self._entries.pop((workflow, node), None)
            self._entries[workflow, node] = entry
            while len(self._entries) > MOST:
                self._entries.popitem(last=False)
            changed = [dict(entry)]
            for report in self._entries.values() if kind != REPORT else ():
                if report["workflow"] == workflow and report["type"] == REPORT and report["run"] != run:
                    report |= EARLIER._asdict()  # the node now runs in another run than the report
                    changed.append(dict(report))
        for entry in changed:
            self.send(entry)

    def of_workflow(self, workflow: str) -> list[Entry]:
        with self._lock:
            return [dict(entry) for (number, _), entry in self._entries.items() if number == workflow]


node_status = NodeStatus()


def add_route() -> None:
    """Let ComfyUI's server send status entries, and answer a page that asks for those of a workflow."""
    from aiohttp import web
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:  # a program that uses only the nodes
        return

    async def answer(request: Any) -> Any:
        return web.json_response(node_status.of_workflow(request.query.get("workflow", "")))

    server.routes.get(ROUTE)(answer)
    node_status.send = partial(server.send_sync, EVENT)
