"""The command `serve`: a live page and an API on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from maskless.cli import show
from maskless.cli.options import DEVICE
from maskless.terminal import say

if TYPE_CHECKING:
    from maskless.serve.host import Limits
    from maskless.serve.run import Address
    from maskless.serve.workers import Worker

SHIPPED = ("stories", "stories-mdlm", "stories-ar", "cifar10")  # served where no model is named, those that are there


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A run or model folder, a hub id, or a released file. Default: the shipped models."),
    ] = None,
    mdlm: Annotated[str | None, typer.Option(help="A second text model, for the race.")] = None,
    ar: Annotated[str | None, typer.Option(help="An autoregressive text model, for the race.")] = None,
    pictures: Annotated[str | None, typer.Option(help="An image model.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 lets other machines in: set an --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MASKLESS_API_KEY", help="Key that requests must send as a bearer token.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Most waiting requests, per model.")] = 64,
    batch: Annotated[int, typer.Option(help="Most texts in a batch; 1: one at a time.")] = 64,
    max_length: Annotated[int, typer.Option(help="Most tokens of a text, within the model's context.")] = 4096,
    max_steps: Annotated[int, typer.Option(help="Most steps of a request.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Time limit of a request, in seconds.")] = 60.0,
    device: DEVICE = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Several devices, a process for each: 0,1 or cuda:0,cuda:1 or cpu,cpu.", metavar="LIST"),
    ] = None,
) -> None:
    """Serve a live page and an HTTP API, to this machine only unless --host says otherwise.

    maskless serve

    maskless serve runs/my --mdlm runs/my-mdlm --pictures runs/digits

    maskless serve runs/my --devices 0,1,2,3

    curl localhost:8000/v1/fill --json '{"text": "The \\[8] sat on \\[12].", "steps": 16}'
    """
    with show.waiting("starting"):
        from maskless.serve.host import Limits
        from maskless.serve.run import Address
        from maskless.serve.workers import Worker, devices_of, supervise

    address = Address(host=host, port=port, key=api_key)
    chosen = [] if devices is None else devices_of(devices)
    part = -(-queue // max(1, len(chosen)))  # all workers together hold the limit
    limits = Limits(length=max_length, steps=max_steps, batch=batch, queue=part, seconds=timeout)
    named = [source for source in (model, mdlm, ar, pictures) if source is not None] or shipped_models()
    worker = Worker.here()
    if not chosen or worker is not None:
        _serve_here(named, limits, address, device, worker)
        return
    if device is not None:
        raise ValueError(f"device {device} and devices {devices}: expected one of the two")
    raise typer.Exit(supervise(chosen, address, lambda page: _say_open(page, chosen, address), show.note))


def _serve_here(named: list[str], limits: Limits, address: Address, device: str | None, worker: Worker | None) -> None:
    """Serve in this process, which may be one of several workers."""
    from maskless.serve.run import load
    from maskless.serve.run import serve as listen

    with ExitStack() as line:
        line.enter_context(show.waiting(f"loading {', '.join(named)}"))

        def ready(page: str) -> None:
            line.close()
            if worker is None:
                _say_open(page, [one.name for one in hosts], address)

        hosts = load(named, limits, device=device)
        listener, share = (None, None) if worker is None else (worker.listener(), worker.share)
        listen(hosts, limits, address, ready=ready, listener=listener, share=share)


def _say_open(page: str, what: list[str], address: Address) -> None:
    say(f"{page}  ({', '.join(what)}; Ctrl-C stops)")
    if not address.local and address.key is None:
        show.err.print("Anyone who can reach this machine can use it: set an --api-key.", highlight=False)


def shipped_models() -> list[str]:
    """Those that come with this version."""
    from maskless import shipped

    found = [name for name in SHIPPED if name in shipped.names()]
    if not found:
        raise ValueError("no models are shipped with this version: expected a MODEL, as in: maskless serve runs/my")
    return found
