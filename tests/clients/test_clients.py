"""The clients that `make show-clients` runs are described in full, and docs/clients.md has a row for each."""

from __future__ import annotations

import re

from tests.clients.coding_clis import AGENTS
from tests.clients.show import FEATURES, HERE, PROGRAMS, clients

PAGE = HERE.parents[1] / "docs/clients.md"


def test_every_client_can_be_had_and_tries_features_that_the_table_has() -> None:
    for client in clients():
        assert bool(client.pip) + bool(client.npm) + bool(client.command) == 1, client.name
        assert client.agent in AGENTS or (PROGRAMS / client.program).is_file(), client.name
        assert client.features and not {*client.features}.difference(FEATURES), client.name


def test_every_program_is_a_client_s() -> None:
    programs = {path.name for path in PROGRAMS.glob("with_*")}
    assert programs == {client.program for client in clients() if client.program}


def test_the_page_has_a_row_for_every_client_in_the_versions_that_are_installed() -> None:
    rows = dict(re.findall(r"^\| (.+?) +\| (\S+) +\|", PAGE.read_text(), re.MULTILINE))
    for client in clients():
        assert client.name in rows, client.name
        if client.pip or client.npm:
            assert (*client.pip, *client.npm)[0].endswith(rows[client.name]), client.name
