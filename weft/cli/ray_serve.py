"""Weft as an application of Ray Serve: `serve run weft.cluster:app model=smollm2 replicas=2`.

Its deployment is the edge: Weft's own HTTP application, in as many Serve replicas as the user's Serve config asks for.
The engines are not Serve's: the edges share the replicas of one cluster, which their controller keeps on the same Ray.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import ray
from fastapi import FastAPI
from msgspec.structs import replace
from ray import serve

from weft import logs
from weft.api.app import admission_app
from weft.api.background import BackgroundWork
from weft.backends import start_engine
from weft.config import load
from weft.errors import ConfigError
from weft.options import Config, settings
from weft.serving.admission import Admission

MAX_ONGOING_REQUESTS = 1000
"""Requests at one edge at the same time; Serve's own default would be 5."""
DEPLOYMENT = "Edge"


class EdgeDeployment:
    """One edge: it starts with the replicas, or joins those of the edges before it."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        config = edge_config(arguments)
        logs.set_up(config.server.log_level, form=config.server.log_format)
        address = config.cluster.ray_address or ray.get_runtime_context().gcs_address
        # Files, batches and kept responses are this edge's own, and end with it.
        self._folder = tempfile.TemporaryDirectory(prefix="weft-edge-")
        self._config = replace(
            config,
            cluster=replace(config.cluster, ray_address=address),
            server=replace(config.server, data_dir=config.server.data_dir or self._folder.name),
        )
        self._admission = Admission(self._config)
        self._background = BackgroundWork(self._admission)
        self._engine = await start_engine(self._config)
        self._admission.open(self._engine)
        await self._background.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return admission_app(self._admission, self._background)

    def check_health(self) -> None:
        """Serve replaces an edge for which this raises."""
        health = self._engine.health()
        if health.reason in ("failed", "closed"):
            raise RuntimeError(f"The engine of this edge is {health.reason}.")

    async def __del__(self) -> None:
        await self._background.stop()
        await self._admission.close()
        self._folder.cleanup()


def edge_config(arguments: Mapping[str, Any]) -> Config:
    """Return the configuration of the arguments of the application, which have the names of Weft's settings, and of the
    environment. Arguments of `serve run` are text, and read as the environment is. Raises ConfigError."""
    by_name = {setting.name: setting for setting in settings()}
    texts = {
        by_name[name].env: value for name, value in arguments.items() if name in by_name and isinstance(value, str)
    }
    flags = {name: value for name, value in arguments.items() if name not in by_name or not isinstance(value, str)}
    # Serve's proxy is what listens; who may reach it is Serve's to say, and who may ask is for the keys.
    config = load(flags, env={**os.environ, **texts}, defaults={"replicas": 1, "insecure": True})
    if config.fleet.models_file:
        raise ConfigError("An application of Ray Serve has one model: models_file cannot be set.")
    return config


def app(arguments: dict[str, Any]) -> serve.Application:
    """Build the application. `arguments`: Weft's settings by their names; `edges` may hold options of the deployment,
    as in {"num_replicas": 2}."""
    options = {"max_ongoing_requests": MAX_ONGOING_REQUESTS, **arguments.pop("edges", {})}
    edge_config(arguments)  # a mistake is told here, and not by an edge that does not start
    deployed: serve.Deployment = serve.deployment(name=DEPLOYMENT, **options)(serve.ingress()(EdgeDeployment))
    return deployed.bind(arguments)
