"""The routes of the page, their headers and errors."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from PIL.Image import Image
from pydantic import BeforeValidator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from sima_attn._version import __version__
from sima_attn.detect.weights import LoadedDetector
from sima_attn.explain.photo_model import PhotoModel
from sima_attn.serve.analysis import Analysis, Analyzer, Effect, ModelFacts, Times
from sima_attn.serve.connections import LoopErrors
from sima_attn.serve.detection import add_detection
from sima_attn.serve.in_browser import BrowserModel, InBrowser
from sima_attn.serve.limits import Gate, Limits, Refusal
from sima_attn.serve.photos import decode, find_samples, shrink, to_jpeg

LOCAL = ("127.0.0.1", "localhost", "::1")
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
# No inline scripts or styles, nothing from other hosts.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/parts.js": ("parts.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/browser": ("browser.html", "text/html"),
    "/browser.js": ("browser.js", "text/javascript"),
}
DETECTOR_PAGE = {
    "/": ("detect.html", "text/html"),
    "/detect.js": ("detect.js", "text/javascript"),
    **{route: PAGE[route] for route in ("/page.css", "/parts.js", "/icon.svg")},
}
MAY_COMPILE = {"/browser": {"Content-Security-Policy": POLICY.replace("'self'", "'self' 'wasm-unsafe-eval'", 1)}}
PHOTO_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
ERROR = {"application/json": {"schema": {"type": "object", "properties": {"detail": {"type": "string"}}}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is empty", "content": ERROR},
    403: {"description": "Sent by another site", "content": ERROR},
    408: {"description": "The upload took too long", "content": ERROR},
    413: {"description": "Too many bytes or pixels", "content": ERROR},
    415: {"description": "Not an image", "content": ERROR},
    422: {"description": "A broken image, or a setting out of range", "content": ERROR},
    429: {"description": "Too many requests are waiting", "content": ERROR},
    504: {"description": "Timeout", "content": ERROR},
}
log = logging.getLogger("sima_attn.serve")


def _digits(text: object) -> object:
    """Reject what pydantic would accept as an int, but is not written in digits: 1.0, 1_000."""
    if isinstance(text, str) and not re.fullmatch("-?[0-9]+", text):
        raise ValueError("must be written in digits")
    return text


Digits = Annotated[int, BeforeValidator(_digits)]
Number = Annotated[Digits, Query(ge=0, le=100_000)]


def create_app(
    photo_model: PhotoModel | LoadedDetector,
    *,
    samples: Path | None = None,
    limits: Limits | None = None,
    hosts: tuple[str, ...] | None = LOCAL,
    in_browser: InBrowser | None = None,
) -> FastAPI:
    """The application. `hosts` are the allowed names in the Host header, None for any (against DNS rebinding)."""
    limits = limits or Limits()
    gate, offered = Gate(limits), find_samples(samples)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        gate.open()
        yield
        gate.close()

    app = FastAPI(
        title="sima-attn",
        version=__version__,
        docs_url=None,  # its scripts come from another host
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.gate = gate
    _answer_errors(app, hosts)
    _add_samples(app, offered, limits, gate)

    async def on_photo(
        request: Request, prepare: Callable[[Image], Any], analyze: Callable[[Any], Any] | None = None
    ) -> Any:
        """Read the photo, then admit the request, prepare the photo and analyze what came of it.

        A request enters the queue after its upload, so that a slow upload does not block others. If the queue is full,
        the client gets an error before it uploads. Only what was prepared waits for the model: it is small.
        """
        gate.check_not_full()
        data = await _body(request, limits)
        with gate.admit():
            prepared = await gate.decode(lambda: prepare(decode(data, limits)))
            return prepared if analyze is None else await gate.run(partial(analyze, prepared))

    @app.get("/healthz")
    async def healthz() -> dict[str, str | int]:
        """Status, and the number of requests in progress."""
        return {"status": "ok", "inside": gate.inside}

    if isinstance(photo_model, LoadedDetector):
        _add_page(app, DETECTOR_PAGE)
        add_detection(app, photo_model, on_photo, openapi_extra=PHOTO_BODY, responses=REFUSALS)
        return app
    _add_page(app, PAGE)
    _add_browser(app, in_browser or InBrowser())
    analyzer = Analyzer(photo_model, limits)
    Size = Annotated[Digits, Query(ge=1, le=4096, description="Pixels.", json_schema_extra={"enum": analyzer.sizes})]

    @app.get("/api/model", responses={429: REFUSALS[429], 504: REFUSALS[504]})
    async def model() -> ModelFacts:
        """The model and its cost."""
        with gate.admit():
            return await gate.run(lambda: analyzer.facts)

    @app.post("/api/analyze", openapi_extra=PHOTO_BODY, responses=REFUSALS)
    async def analyze(request: Request, size: Size | None = None) -> Analysis:
        """The five most probable classes and the maps of all layers; the body is the photo file.

        `size` is that of the maps; the classes are always those at the size of the model, as in `sima classify`.
        """
        return await on_photo(request, analyzer.prepare, lambda photo: analyzer.analyze(photo, size))

    @app.post(
        "/api/picture",
        openapi_extra=PHOTO_BODY,
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}}, **REFUSALS},
    )
    async def picture(request: Request) -> Response:
        """The photo as JPEG, for a format that the browser cannot show, such as TIFF; the body is the photo file."""
        content = await on_photo(request, lambda photo: to_jpeg(shrink(photo)))
        return Response(content, media_type="image/jpeg")

    @app.post("/api/effect", openapi_extra=PHOTO_BODY, responses=REFUSALS)
    async def effect(request: Request, layer: Number, row: Number, column: Number, size: Size | None = None) -> Effect:
        """Contribution of the other patches to one patch; the body is the photo file."""
        return await on_photo(request, shrink, lambda photo: analyzer.effect(photo, layer, row, column, size))

    @app.post("/api/times", openapi_extra=PHOTO_BODY, responses=REFUSALS)
    async def times(request: Request, size: Size) -> Times:
        """Time of a forward pass with SimA and with softmax; the body is the photo file."""
        return await on_photo(request, shrink, lambda photo: analyzer.times(photo, size))

    return app


def _add_page(app: FastAPI, page: Mapping[str, tuple[str, str]]) -> None:
    folder = files("sima_attn.serve").joinpath("page")
    for route, (name, kind) in page.items():
        answer = partial(Response, folder.joinpath(name).read_bytes(), media_type=f"{kind}; charset=utf-8")
        app.add_route(route, lambda _request, answer=answer: answer(), methods=["GET"])  # type: ignore[misc]


def _add_samples(app: FastAPI, offered: Mapping[str, Path], limits: Limits, gate: Gate) -> None:
    @app.get("/api/samples")
    async def samples() -> list[str]:
        """Names of the photos that the page offers."""
        return list(offered)

    @app.get(
        "/api/samples/{name}",
        response_class=Response,
        responses={
            200: {"content": {"image/jpeg": {}}},
            404: {"description": "Unknown sample", "content": ERROR},
            **{status: REFUSALS[status] for status in (422, 429, 504)},
        },
    )
    async def sample(name: str, side: Annotated[Digits, Query(ge=16, le=1024)] = 1024) -> Response:
        """A photo as JPEG."""
        if name not in offered:
            raise Refusal(404, "unknown sample")
        with gate.admit():
            content = await gate.decode(lambda: to_jpeg(shrink(decode(offered[name].read_bytes(), limits), side)))
        return Response(content, media_type="image/jpeg")


def _add_browser(app: FastAPI, in_browser: InBrowser) -> None:
    @app.get("/api/browser", responses={404: {"description": "Nothing to run in the browser", "content": ERROR}})
    async def browser() -> BrowserModel:
        """The model that the page `browser` runs."""
        return in_browser.facts()

    @app.get("/browser/{name}", include_in_schema=False)
    async def browser_file(name: str) -> FileResponse:
        if name not in in_browser.files:
            raise Refusal(404, "unknown file")
        path, kind = in_browser.files[name]
        return FileResponse(path, media_type=kind)


async def _body(request: Request, limits: Limits) -> bytes:
    """The body; reading stops when it is too large."""
    too_large = Refusal(413, f"the photo is larger than the allowed {limits.bytes / 2**20:g} MiB")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limits.bytes:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the upload took longer than {limits.upload_seconds:g} seconds") from None
    except ClientDisconnect:
        raise Refusal(400, "the client closed the connection during the upload") from None
    return bytes(data)


def _host_name(request: Request) -> str | None:
    """The name in the Host header; None if the header is malformed or missing."""
    found = HOST.fullmatch(request.headers.get("host", "").lower())
    if found is None or int(found["port"] or 0) > 65535:
        return None
    return found["ipv6"] or found["name"]


def _is_from_another_site(request: Request) -> bool:
    """Whether, according to the browser, a page of another site sent the request."""
    host, origin = request.headers["host"].lower(), request.headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):  # https: behind a proxy
        return True
    return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _answer_errors(app: FastAPI, hosts: tuple[str, ...] | None) -> None:
    """Add headers to all answers; answer errors with {"detail": one sentence}, without paths or stack traces."""

    def answer(status: int, message: str) -> JSONResponse:
        headers = {**HEADERS, **({"Retry-After": "3"} if status == 429 else {})}
        return JSONResponse({"detail": message}, status, headers)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        name = _host_name(request)
        if name is None:
            return answer(400, "the Host header must be NAME or NAME:PORT")
        if hosts is not None and name not in hosts:
            return answer(400, f"the Host header must name one of: {', '.join(hosts)}")
        if request.method not in ("GET", "HEAD") and _is_from_another_site(request):
            return answer(403, "requests from other sites are not allowed")
        try:
            response = await call_next(request)
        except Exception:
            log.exception("%s failed", request.url.path)  # the stack trace goes to the log only
            return answer(500, "internal error; see the log of the server")
        response.headers.update(HEADERS | MAY_COMPILE.get(request.url.path, {}))
        return response

    @app.exception_handler(Refusal)
    async def refuse(_request: Request, refusal: Refusal) -> JSONResponse:
        return answer(refusal.status, refusal.message)

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> JSONResponse:
        response = answer(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(422, "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()))
