"""``offload inspect``, ``verify`` and ``convert``: what a checkpoint holds, whether it is whole, other forms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.cli.failures import reported
from offload.cli.options import SIZE
from offload.config import ConfigError
from offload.telemetry import dump_json, format_bytes

if TYPE_CHECKING:
    from offload.checkpoint.export import Tensors
    from offload.checkpoint.foreign import ForeignParameter

FORMS = ("safetensors", "checkpoint", "dcp")


@click.command("inspect")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def inspect_command(path: str, as_json: bool, debug: bool) -> None:
    """List what a checkpoint holds; of a directory with several, each with its size and whether it is complete.

    PATH may also be the directory of a run.
    """
    with reported(debug=debug):
        from offload.checkpoint.places import (
            STEP_DIRECTORY,
            checkpoints_in,
            find_checkpoint,
            is_complete,
            step_directories,
        )

        root = checkpoints_in(Path(path))
        if not is_complete(root) and (steps := step_directories(root)):
            found = [_brief(step, directory) for step, directory in steps]
            if as_json:
                click.echo(dump_json({"checkpoints": found}))
                return
            for entry in found:
                click.echo(f"{entry['path']}: {format_bytes(entry['bytes'])}, {entry['state']}")
            return
        # Of a directory that its name makes a checkpoint it is told what is wrong with it as one.
        _show(_details(root if STEP_DIRECTORY.fullmatch(root.name) else find_checkpoint(root)), as_json)


def _brief(step: int, directory: Path) -> dict[str, Any]:
    from offload.checkpoint.errors import CheckpointError
    from offload.checkpoint.places import is_complete
    from offload.checkpoint.reader import Source

    size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    state = "incomplete: its save was cut short"
    if is_complete(directory):
        try:
            Source(directory).close()
            state = "complete"
        except CheckpointError as error:
            state = f"damaged: {error}"
    return {"path": str(directory), "step": step, "bytes": size, "state": state}


def _details(root: Path) -> dict[str, Any]:
    from offload.checkpoint.format import DTYPE_NAMES
    from offload.checkpoint.reader import Source

    with Source(root) as source:
        manifest = source.manifest
        return {
            "path": str(root),
            "step": manifest.step,
            "world": manifest.world,
            "created": manifest.created,
            "bytes": manifest.nbytes,
            "parameters": {
                name: {
                    "shape": list(p.shape),
                    "dtype": DTYPE_NAMES[p.dtype],
                    "state": p.encoding or "frozen",
                    "steps": p.steps,
                }
                for name, p in manifest.parameters.items()
            },
            "elements": sum(p.numel for p in manifest.parameters.values()),
            "buffers": list(manifest.buffers),
            "groups": len(manifest.groups),
            "scheduler": manifest.scheduler.get("class") if isinstance(manifest.scheduler, dict) else None,
            "data": manifest.data,
            "versions": dict(manifest.versions),
        }


def _show(details: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(dump_json(details))
        return
    head = (
        f"{details['path']}: step {details['step']}, {details['elements']:,} elements, {format_bytes(details['bytes'])}"
    )
    click.echo(f"{head}, written by {details['world']} ranks at {details['created'] or 'an unknown time'}")
    for name, entry in details["parameters"].items():
        click.echo(f"  {name} {entry['shape']} {entry['dtype']} {entry['state']}, {entry['steps']} steps")
    for name in details["buffers"]:
        click.echo(f"  {name} (buffer)")
    versions = ", ".join(f"{name} {version}" for name, version in details["versions"].items())
    click.echo(f"{details['groups']} parameter groups, scheduler {details['scheduler'] or 'none'}; {versions}")


@click.command("verify")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def verify_command(path: str, as_json: bool, debug: bool) -> None:
    """Read every byte of a checkpoint and compare every checksum: of PATH, or of the newest complete one in it.

    PATH may also be the directory of a run.
    """
    with reported(debug=debug):
        from offload.checkpoint.places import find_checkpoint
        from offload.checkpoint.reader import Source

        directory = find_checkpoint(path)
        with Source(directory) as source:
            nbytes = source.verify()
        if as_json:
            click.echo(dump_json({"path": str(directory), "bytes": nbytes, "whole": True}))
            return
        click.echo(f"{directory}: whole, {format_bytes(nbytes)} read")


@click.command("convert")
@click.argument("source")
@click.argument("target")
@click.option("--to", "form", type=click.Choice(FORMS), default="safetensors", show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Of safetensors; by default as saved.")
@click.option(
    "--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Bytes of a safetensors file at most."
)
@click.option("--carry", help="Directory whose configuration and tokenizer files are copied along.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def convert_command(
    source: str,
    target: str,
    form: str,
    dtype: str | None,
    max_shard_size: int,
    carry: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Convert SOURCE and write TARGET, streaming: no more than a few buffers are held.

    SOURCE is a checkpoint (or a directory of several, or of a run: the newest complete one), a
    torch.distributed.checkpoint, a DeepSpeed ZeRO checkpoint, or safetensors files. As `safetensors` the weights are
    written as `save_pretrained` of transformers does; as `checkpoint` or `dcp` with masters, moments and step counts.
    """
    with reported(debug=debug):
        if dtype is not None and form != "safetensors":
            raise ConfigError([f"--dtype {dtype}: only safetensors are converted; a {form} keeps every bit"])
        result = _convert(Path(source), Path(target), form, dtype, max_shard_size, carry)
        if as_json:
            click.echo(dump_json(result))
            return
        click.echo(f"{result['target']}: {format_bytes(result['bytes'])} as {form}, from {result['source']}")


def _convert(
    source: Path, target: Path, form: str, dtype: str | None, max_shard_size: int, carry: str | None
) -> dict[str, Any]:
    from contextlib import ExitStack

    from offload.checkpoint.dcp import write_dcp
    from offload.checkpoint.export import carried_from, export_tensors, fits
    from offload.checkpoint.foreign import write_foreign
    from offload.checkpoint.interchange import open_any, own_checkpoint, weights_of
    from offload.checkpoint.places import free_bytes, why_not_writable

    problems = [] if source.exists() else [f"{source}: no such file or directory"]
    if (reason := why_not_writable(target)) is not None:
        problems.append(f"{target}: {reason}; choose another TARGET")
    if problems:
        raise ConfigError(problems)
    with ExitStack() as stack:
        found = own_checkpoint(source) or source
        parameters, step, buffers, carried = open_any(found, stack)
        done: dict[str, Any] = {"source": str(found), "step": step}
        if form == "checkpoint":
            written = write_foreign(target, parameters, step=step, origin=str(found))
            return done | {"target": str(written), "bytes": sum(f.stat().st_size for f in written.iterdir())}
        if form == "dcp":
            items = _dcp_items(parameters) + [(("model", t.name), t) for t in buffers]
            fits([tensor for _, tensor in items], target, free_bytes(target))
            return done | {"target": str(target), "bytes": write_dcp(target, items)}
        tensors = [*weights_of(parameters, dtype), *buffers]
        fits(tensors, target, free_bytes(target))
        files: Sequence[Path] = carried_from(carry) if carry is not None else carried
        exported = export_tensors(tensors, target, max_shard_size=max_shard_size, carried=files)
        return done | {"target": str(target), "bytes": exported.nbytes, "files": list(exported.files)}


def _dcp_items(parameters: Sequence[ForeignParameter]) -> list[tuple[tuple[str, ...], Tensors]]:
    from offload.checkpoint.interchange import dcp_tensors

    return [item for parameter in parameters for item in dcp_tensors(parameter)]
