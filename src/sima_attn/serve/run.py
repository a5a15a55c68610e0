"""uvicorn around the page."""

from __future__ import annotations

import errno
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sima_attn.explain.subject import Subject
    from sima_attn.serve.limits import Limits

NEEDED = ("fastapi", "uvicorn", "PIL")


def check_installed() -> None:
    """Say what is missing before anything else is done."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"the page needs {', '.join(missing)}, not installed here: pip install 'sima-attn[serve]'")


def serve(
    subject: Subject,
    *,
    host: str,
    port: int,
    samples: Path | None,
    limits: Limits,
    onnx: Path | None = None,
    onnxruntime_web: Path | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; what runs then is finished first."""
    import uvicorn

    from sima_attn.serve.app import LOCAL, create_app
    from sima_attn.serve.in_browser import InBrowser

    hosts = LOCAL if host in LOCAL else None
    in_browser = InBrowser(onnx, onnxruntime_web)
    app = create_app(subject, samples=samples, limits=limits, hosts=hosts, in_browser=in_browser)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # before the address is printed: who reads it may come at once
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
            raise ValueError(
                f"cannot listen on {host}: {error.strerror}; --host is a name or an address of this machine, such as "
                "127.0.0.1, or 0.0.0.0 for all of them"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]}  (Ctrl-C stops it)", flush=True)
        config = uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=10, timeout_graceful_shutdown=15, server_header=False
        )
        uvicorn.Server(config).run(sockets=[listener])
