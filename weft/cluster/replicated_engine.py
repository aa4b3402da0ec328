"""The engine `replicas`: Weft's own engine on any number of replicas. The text is handled here, as that engine does;
`replica_pool` has the journal and chooses the replica of each request."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import uuid
from functools import partial
from pathlib import Path

from weft.backends.adapters import Adapters
from weft.backends.contract import Health, final_output
from weft.backends.model_text import ModelText, open_model_text
from weft.backends.native import LORA_TRIAL_PARAMS, NativeEngine
from weft.checkpoint.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_paths
from weft.checkpoint.model_files import ModelFiles
from weft.cluster.membership import Membership, static_membership
from weft.cluster.replica_link import read_key, tls_context
from weft.cluster.replica_pool import ReplicaPool
from weft.errors import ModelError, WeftError
from weft.hub.resolve import find_model
from weft.options import Config
from weft.types import GenerationRequest, LoadLora, Sample


async def start_replicated(config: Config, files: ModelFiles | None = None) -> ReplicatedEngine:
    """Connect to the replicas of a model, and return an engine as soon as one of them is ready."""
    if files is None:
        files = await asyncio.to_thread(find_model, config)
    options = config.cluster
    if options.replica_addresses:
        membership: Membership = static_membership(options, read_key(options))
    else:
        ray = importlib.import_module("weft.cluster.ray_membership")
        membership = await ray.open_ray_membership(config, files)
    pool = ReplicaPool(config, files, membership, tls_context(options, is_server=False))
    opening = asyncio.create_task(asyncio.to_thread(open_model_text, files, config.model))
    try:
        await pool.start()
        engine = ReplicatedEngine(pool, await opening, SharedAdapters(pool.model.name, files))
        for name, path in adapter_paths(config).items():
            await engine.control(LoadLora(name, path))
        return engine
    except BaseException:
        await pool.close()
        await asyncio.wait([opening])
        if opening.exception() is None:
            opening.result().close()
        raise


class SharedAdapters(Adapters):
    """The adapters of an engine that shares its replicas with other edges: their numbers are made of their files, so
    that a number means the same adapter at every edge."""

    def __init__(self, model_name: str, files: ModelFiles) -> None:
        super().__init__(model_name, files)
        self._digests: dict[Path, int] = {}

    def checked(self, path: str) -> Path:
        folder = super().checked(path)
        digest = hashlib.blake2b(str(folder).encode(), digest_size=8)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32)).digest())
        self._digests[folder] = int.from_bytes(digest.digest()) >> 1 | 1
        return folder

    def _number(self, folder: Path) -> int:
        return self._digests[folder]


class ReplicatedEngine(NativeEngine):
    """Weft's own engine on replicas: its text is here, and its tokens come from whichever replica has a request."""

    name = "replicas"

    def __init__(self, pool: ReplicaPool, text: ModelText, adapters: Adapters) -> None:
        super().__init__(pool, text, adapters)
        self.pool = pool

    def health(self) -> Health:
        if self.pool.state != "ready":
            return Health(False, self.pool.state)
        return Health(True) if self.pool.is_alive else Health(False, "no replica is ready")

    async def _load_lora(self, name: str, path: str) -> None:
        """Add an adapter, and try it with one token at every replica. It goes with each request: a replica that joins
        later reads it then."""
        adapter = self._adapters.add(name, await asyncio.to_thread(self._adapters.checked, path))
        was_used = False
        try:
            await asyncio.gather(*(self._try_lora(name, replica) for replica in self.pool.ready_ids))
            was_used = True
        except WeftError as error:
            raise ModelError(f"A replica cannot use the adapter {name}: {error}") from error
        finally:
            if not was_used:
                self._adapters.discard(adapter)

    async def _try_lora(self, name: str, replica: str) -> None:
        request_id = uuid.uuid4().hex
        self.pool.pin(request_id, replica)
        trial = GenerationRequest(
            prompt=[0], task=Sample(params=LORA_TRIAL_PARAMS), adapter=name, request_id=request_id
        )
        try:
            await final_output(await self.submit(trial))
        finally:
            self.pool.unpin(request_id)
