"""The commands that look after a cluster on Ray: `weft cluster status`, `top`, `drain`, `restart` and `scale`.

They speak to the cluster's controller, through Ray, which lives as long as the command.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from weft.cli.command_flags import JsonFlag, console
from weft.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from rich.table import Table

    from weft.cluster.ray_messages import ClusterStatus

CALL_S = 30.0
TOP_EVERY_S = 1.0

Address = Annotated[
    str,
    typer.Option(
        "--ray-address", help="The Ray cluster, as in 10.0.0.1:6379; empty: this machine's.", envvar="WEFT_RAY_ADDRESS"
    ),
]
Name = Annotated[str, typer.Option("--cluster-name", help="The name of the cluster.", envvar="WEFT_CLUSTER_NAME")]
ReplicaId = Annotated[str, typer.Argument(help="The replica, as `weft cluster status` names it.", metavar="REPLICA")]

app = typer.Typer(help="Look after the replicas of a cluster on Ray.", no_args_is_help=True)


@app.command()
def status(ray_address: Address = "", cluster_name: Name = "weft", as_json: JsonFlag = False) -> None:
    """Show the replicas of a cluster: node, state, load and KV usage."""
    told = _status(_controller(ray_address, cluster_name))
    if as_json:
        typer.echo(msgspec.json.encode(told).decode())
    else:
        console().print(status_table(told))


@app.command()
def top(ray_address: Address = "", cluster_name: Name = "weft", as_json: JsonFlag = False) -> None:
    """Watch the replicas of a cluster. Ctrl-C ends it. With --json it writes a line every second."""
    controller = _controller(ray_address, cluster_name)
    with suppress(KeyboardInterrupt):
        if as_json:
            while True:
                sys.stdout.write(msgspec.json.encode(_status(controller)).decode() + "\n")
                sys.stdout.flush()
                time.sleep(TOP_EVERY_S)
        from rich.live import Live

        with Live(status_table(_status(controller)), console=console(), screen=False, auto_refresh=False) as live:
            while True:
                time.sleep(TOP_EVERY_S)
                live.update(status_table(_status(controller)), refresh=True)


@app.command()
def drain(replica: ReplicaId, ray_address: Address = "", cluster_name: Name = "weft") -> None:
    """Let a replica finish its requests and end. Another is started in its place."""
    if not _called(_controller(ray_address, cluster_name).drain.remote(replica)):
        raise ConfigError(f"The cluster {cluster_name} has no replica {replica!r}.", hint="`weft cluster status`.")
    typer.echo(f"{replica} drains.")


@app.command()
def restart(ray_address: Address = "", cluster_name: Name = "weft") -> None:
    """Replace all replicas, one at a time: a new one starts, then an old one finishes its requests and ends."""
    _called(_controller(ray_address, cluster_name).restart.remote())
    typer.echo("The replicas are replaced one at a time; `weft cluster top` shows it.")


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(help="How many replicas there should be.", min=0, metavar="N")],
    ray_address: Address = "",
    cluster_name: Name = "weft",
) -> None:
    """Set the number of replicas, within --min-replicas and --max-replicas."""
    target = _called(_controller(ray_address, cluster_name).scale.remote(replicas))
    typer.echo(f"The cluster {cluster_name} goes to {target} replicas.")


def status_table(told: ClusterStatus) -> Table:
    from rich.table import Table

    least, most = told.min_replicas, told.max_replicas
    limits = f"{least}" if least == most else f"{least} to {most}"
    title = f"{told.name}: {told.model}, {told.target} replicas wanted ({limits}), {told.edges} edges"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, caption=told.problem or None)
    for column in ("replica", "state", "node", "address"):
        table.add_column(column)
    for column in ("running", "waiting", "KV usage", "engine restarts"):
        table.add_column(column, justify="right")
    for one in told.replicas:
        load = (str(one.running), str(one.waiting), f"{one.kv_usage:.0%}", str(one.engine_restarts))
        table.add_row(one.id, one.state, one.node, one.address, *load)
    return table


def _controller(address: str, name: str) -> Any:
    from weft.cluster.ray_agent import connect

    connect(address, may_start=False)
    import ray

    from weft.cluster.ray_controller import NAMESPACE, controller_name

    try:
        return ray.get_actor(controller_name(name), namespace=NAMESPACE)
    except ValueError as error:
        raise Unavailable(
            f"There is no cluster {name!r} on this Ray.", hint="`weft serve --replicas N` starts one; --cluster-name."
        ) from error


def _called(answer: Any) -> Any:
    import ray

    try:
        return ray.get(answer, timeout=CALL_S)
    except ray.exceptions.RayError as error:
        raise Unavailable(f"The controller of the cluster does not answer: {type(error).__name__}.") from error


def _status(controller: Any) -> ClusterStatus:
    from weft.cluster.ray_messages import ClusterStatus

    return msgspec.json.decode(_called(controller.status.remote()), type=ClusterStatus)
