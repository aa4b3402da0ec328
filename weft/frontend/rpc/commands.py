"""What the Control method is told to do."""

from __future__ import annotations

from collections.abc import Iterable

from weft.errors import InvalidRequest
from weft.frontend.errors import WrongKey
from weft.frontend.gate import Gate
from weft.frontend.rpc.ai_service_pb2 import ControlMessage
from weft.frontend.slot import Slot


class Commands:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def obey(self, request: ControlMessage, keys: Iterable[str]) -> dict[str, str]:
        """The payload of the answer. `keys` are those that the caller showed."""
        match request.command:
            case "ping":
                return {"message": "pong"}
            case "list_models":
                return self._list()
            case "load_model":
                slot = self._slot(request, keys)
                slot.forgive()
                await self._gate.fleet.load(slot)
                return {"state": slot.state}
            case "unload_model":
                slot = self._slot(request, keys)
                await slot.unload()
                return {"state": slot.state}
            case "reload_registry":
                self._check_admin(keys)
                self._gate.fleet.reload()
                return self._list()
            case command:
                raise InvalidRequest(f"There is no command {command!r:.200}.")

    def _list(self) -> dict[str, str]:
        self._gate.check_open()
        slots = self._gate.fleet.slots
        every = [name for slot in slots for name in (slot.name, *slot.adapter_names, slot.draws) if name]
        names = {"models": ",".join(every)}
        if self._gate.fleet.has_many:
            names["loaded"] = ",".join(slot.name for slot in slots if slot.is_open)
        return names

    def _slot(self, request: ControlMessage, keys: Iterable[str]) -> Slot:
        self._check_admin(keys)
        return self._gate.fleet.named(request.payload.get("model_id", ""))

    def _check_admin(self, keys: Iterable[str]) -> None:
        """In a fleet of one there is nothing to guard: it refuses them all."""
        admins = self._gate.admin_keys
        if self._gate.fleet.has_many and (not admins.required or admins.owner(keys) is None):
            raise WrongKey("This command wants one of the operator's keys (--admin-key).")
