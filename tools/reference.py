"""Writes the sources of the documentation site: python tools/reference.py FOLDER.

They are the pages of docs/, the pages of the repository's root that these link to, and a reference that is made from
the code: commands, settings, routes, metrics, models. The reference is written when the site is built and kept nowhere,
so it cannot be older than the code. A link to any other file of the repository leads to a copy of it in the site.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the root that the site has too."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```(\w*) needs=([\w,]+)$", re.MULTILINE)
NEEDS = {
    "gpu": "an NVIDIA GPU",
    "gpus": "several NVIDIA GPUs",
    "docker": "Docker",
    "ray": "Ray",
    "kubernetes": "a Kubernetes cluster",
    "root": "root on a machine with systemd",
    "files": "the files that it names",
    "network": "a network",
    "hub": "a model from a hub or of your own",
    "server": "other servers",
    "time": "minutes on a machine that has nothing else to do",
    "checkout": "a checkout of Weft",
    "grpcurl": "grpcurl",
    "terminal": "a terminal, where Ctrl-C ends it",
    "shell": "a shell of your own, whose start-up file it changes",
    "agents": "the agents themselves",
    "predecessor": "the program that you come from",
}
"""What a command may need that a test machine lacks, by the words of the fence ```sh needs=gpu."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def shown(value: object) -> str:
    """Return a default as one would write it on the command line; empty where there is none."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in ("", [], None, ()) else ""


def one_line(text: str) -> str:
    return " ".join(text.split())


def commands() -> str:
    """The command line, from the commands themselves."""
    from weft.bench.commands import app as bench_app
    from weft.cli.main import app

    parts = ["# Command line\n", "Made from the code. `weft COMMAND --help` prints the same.\n"]
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    bench = typer.main.get_command(bench_app)
    for name, command in sorted(root.commands.items()):
        if command.hidden:
            continue
        parts += described(f"weft {name}", bench if name == "bench" else command)
    return "\n".join(parts)


def described(name: str, command: TyperCommand | TyperGroup) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for inner, each in sorted(command.commands.items()):
            yield from described(f"{name} {inner}", each)
        return
    usage = command.collect_usage_pieces(command.context_class(command, info_name=name))
    yield f"## {name}\n"
    yield f"```\n{name} {' '.join(usage)}\n```\n"
    paragraphs = [one_line(each) for each in (command.help or "").split("\n\n")]
    yield "\n\n".join(f"    {each}" if each.startswith("weft ") else each for each in paragraphs) + "\n"
    arguments = [each for each in command.params if isinstance(each, TyperArgument) and not each.hidden]
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    shared = {each.opts[0] for each in options} & setting_flags().keys()
    rows = [(f"`{each.metavar or str(each.name).upper()}`", one_line(each.help or "")) for each in arguments]
    rows += [
        (f"`{', '.join((*each.opts, *each.secondary_opts))}`", one_line(each.help or ""))
        for each in options
        if each.opts[0] not in shared and each.name != "help"
    ]
    if rows:
        yield table(("argument or option", "what it does"), rows)
    if shared:
        sections = list(dict.fromkeys(section for flag, section in setting_flags().items() if flag in shared))
        links = ", ".join(f"[{section}](config.md#{section})" for section in sections)
        yield f"It also takes {len(shared)} settings as flags: those of {links}.\n"


def setting_flags() -> Mapping[str, str]:
    """The section of every setting, by its flag."""
    from weft.options import settings

    return {setting.flag: setting.section for setting in settings()}


def configuration() -> str:
    """Every setting, by section."""
    from weft.options import Config, settings

    parts = [
        "# Settings\n",
        "Made from the code. A setting is a flag, an environment variable and a line of the `--config` file "
        "(`[section]`, then the name); a flag goes before the environment, that before the file.\n",
    ]
    for section, options in get_type_hints(Config).items():
        parts += [f"## {section}\n", one_line(options.__doc__ or "") + "\n"]
        rows = [
            (f"`{each.flag}`<br>`{each.env}`", shown(each.default), one_line(each.doc) + choices(each.choices))
            for each in settings(section)
        ]
        parts.append(table(("flag, variable", "default", "what it does"), rows))
    return "\n".join(parts)


def choices(names: Sequence[str]) -> str:
    return f" One of {', '.join(f'`{name}`' for name in names)}." if names else ""


def routes() -> str:
    """Every route, from the application's own description."""
    from weft.api.app import admission_app
    from weft.config import load
    from weft.serving.admission import Admission

    described = admission_app(Admission(load({"admin_key": ["-"]}, env={}))).openapi()
    schemas = described["components"]["schemas"]
    parts = [
        "# Routes\n",
        "Made from what `GET /openapi.json` answers. [The interfaces](../API.md) has examples, and what differs from "
        "OpenAI's and Anthropic's.\n",
    ]
    for path, methods in sorted(described["paths"].items()):
        for method, about in methods.items():
            if method not in ("get", "post", "delete", "put"):
                continue
            parts.append(f"## {method.upper()} {path}\n")
            if text := one_line(about.get("description", "")):
                parts.append(text + "\n")
            for schema in taken_schemas(about):
                parts.append(fields_table(schema, schemas))
    return "\n".join(parts)


def taken_schemas(about: Mapping[str, Any]) -> Iterator[str]:
    for content in about.get("requestBody", {}).get("content", {}).values():
        reference = content.get("schema", {}).get("$ref", "")
        if reference:
            yield reference.rpartition("/")[2]


def fields_table(name: str, schemas: Mapping[str, Any]) -> str:
    schema = schemas[name]
    required = schema.get("required", ())
    rows = [
        (
            f"`{field}`{' (required)' if field in required else ''}",
            kind(about),
            shown(about.get("default")),
            one_line(about.get("description", "")),
        )
        for field, about in schema.get("properties", {}).items()
    ]
    return table(("field", "type", "default", ""), rows) if rows else ""


def kind(schema: Mapping[str, Any]) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            names = [kind(each) for each in schema[several] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(names))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def metrics() -> str:
    """Every metric, from what a scrape of a server with several models answers."""
    from prometheus_client.parser import text_string_to_metric_families

    from weft.engine_stats import EngineStats
    from weft.observe.metrics import ALIAS_PREFIX, OWN_PREFIX, Histogram, Metrics, Residence, exposition
    from weft.types import FinishReason, ModelInfo

    class Source:
        model = ModelInfo(
            name="model", max_model_len=1, logits_width=1, num_blocks=1, block_size=1, device="cpu", dtype="float32"
        )

        def stats(self) -> EngineStats:
            return EngineStats()

    of_model = Metrics("model", Source())
    of_model.left_aside({"user": True})
    of_model.finished("model", FinishReason.STOP, 1.0)
    residence = Residence(model_name="model", is_loaded=True, loads=1, failures=0, unloads=0)
    families = {
        family.name: family
        for family in text_string_to_metric_families(exposition([of_model], [residence], Histogram((1.0,))).decode())
    }
    rows = []
    for name, family in families.items():
        if name.startswith(ALIAS_PREFIX):
            continue
        end = "_total" if family.type == "counter" else ""
        alias = ALIAS_PREFIX + name.removeprefix(OWN_PREFIX)
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        rows.append(
            (
                f"`{name}{end}`",
                family.type,
                ", ".join(f"`{label}`" for label in labels),
                f"`{alias}{end}`" if alias in families else "",
                one_line(family.documentation),
            )
        )
    about = (
        "Made from the code: what `GET /metrics` has. [Operating Weft](../operations.md#metrics-and-dashboard) says "
        "how they are counted. A histogram has `_bucket`, `_sum` and `_count`.\n"
    )
    return "\n".join(["# Metrics\n", about, table(("name", "type", "labels", "vLLM's name", "what it is"), rows)])


def models() -> str:
    """What Weft's own engine loads, from its tables."""
    from weft.checkpoint.gguf import SUPPORTED, UNSUPPORTED
    from weft.hub.catalog import CATALOGUE
    from weft.model.architectures import ARCHITECTURES
    from weft.model.diffusion.diffusers_load import FAMILIES
    from weft.text.parsers.styles import TOOL_STYLES

    def listed(names: Sequence[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    rows = [
        ("architectures (`model_type`)", listed(sorted(ARCHITECTURES))),
        ("tensor types of GGUF files", listed([each.name for each in SUPPORTED.values()])),
        ("tensor types that are refused by name", listed(list(UNSUPPORTED.values()))),
        ("pipelines of `diffusers`", listed(sorted(FAMILIES))),
        ("styles of tool calls", listed([style.name for style in TOOL_STYLES])),
        ("names of the catalogue", listed(sorted(CATALOGUE))),
    ]
    about = "Made from the code. [Models and formats](../supported-models.md) says what was tried and how.\n"
    return "\n".join(["# What the native engine loads\n", about, table(("what", "which"), rows)])


REFERENCE: dict[str, Callable[[], str]] = {
    "cli.md": commands,
    "config.md": configuration,
    "api.md": routes,
    "metrics.md": metrics,
    "models.md": models,
}


def site_page(text: str, page: Path, target: Path, folder: Path) -> str:
    """Return a page's text as the site has it: links stay inside of the site, fences say what they need."""

    def link(match: re.Match[str]) -> str:
        before, name, after = match.groups()
        linked = (page.parent / name).resolve()
        if linked.is_dir():
            linked /= "README.md"
        if not linked.is_relative_to(ROOT) or not linked.exists():
            return match[0]
        place = place_of(linked, folder)
        if not place.exists() and linked.suffix != ".md":
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, place)
        climb = [".."] * len(target.parent.relative_to(folder).parts)
        return f"{before}{Path(*climb, place.relative_to(folder)).as_posix()}{after}"

    def needs(match: re.Match[str]) -> str:
        *others, last = (NEEDS[word] for word in match[2].split(","))
        told = f"{', '.join(others)} and {last}" if others else last
        return f"*Needs {told}:*\n\n```{match[1]}"

    return FENCE.sub(needs, LINK.sub(link, text))


def place_of(file: Path, folder: Path) -> Path:
    """Return where a file of the repository is in the site."""
    if file.is_relative_to(DOCS):
        return folder / file.relative_to(DOCS)
    if file == ROOT / "README.md":
        return folder / "index.md"
    if file.suffix == ".md" and (file.name in PAGES or file.parent == ROOT / "examples"):
        return folder / file.relative_to(ROOT)
    return folder / "repository" / file.relative_to(ROOT)


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.md"))
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES), ROOT / "README.md", ROOT / "examples/README.md"]
    for page in pages:
        target = place_of(page, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(site_page(page.read_text(), page, target, folder))
    for name, make in REFERENCE.items():
        target = folder / "reference" / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(make())


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
