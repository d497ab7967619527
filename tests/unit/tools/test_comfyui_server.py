"""The port of a ComfyUI that a test starts."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from tools.comfyui.server import ComfyServer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the port is reserved on POSIX systems only")


def test_the_port_is_the_servers_alone_until_it_listens_there(tmp_path: Path) -> None:
    """ComfyUI needs minutes for its imports. Another server on its port would be taken for it."""
    server = ComfyServer(Path("python"), tmp_path, tmp_path)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))

    async def comfyui() -> bytes:
        """Listens as ComfyUI's web server does."""
        listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", server.port)
        async with listening:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(comfyui()) == b""
    server.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", server.port))
