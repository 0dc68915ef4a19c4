"""Which pages of other origins may call the API from a browser."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from service.logs import HEADER
from service.settings import Settings


def allow_origins(app: FastAPI, settings: Settings) -> None:
    """Answer the preflight requests of pages of the origins that the settings name, and let these read answers.

    Args:
        app: whatever checks keys has been added to it: browsers send preflight requests without one.
        settings: of the server; without `cors_origins` nothing is added.
    """
    if settings.cors_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[HEADER, "Retry-After"],
        )
