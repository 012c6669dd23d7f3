"""The command `serve`: a live page and an API on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from maskless.cli import show
from maskless.cli.generate import MODEL


def serve(
    model: MODEL,
    mdlm: Annotated[str | None, typer.Option(help="A second model of text, to race against the first.")] = None,
    pictures: Annotated[str | None, typer.Option(help="A model of pictures.")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in: give an --api-key then.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="MASKLESS_API_KEY", help="What requests must bring as a bearer token.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait for a place.")] = 64,
    batch: Annotated[int, typer.Option(help="Texts that are computed together; 1: one after the other.")] = 64,
    max_length: Annotated[int, typer.Option(help="Tokens of a text; at most the model's context.")] = 4096,
    max_steps: Annotated[int, typer.Option(help="Steps of a request.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds from a request's arrival to its end.")] = 60.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
) -> None:
    """Serve a live page and an API, on this machine only unless you say otherwise.

    maskless serve runs/my --mdlm runs/my-mdlm --pictures runs/digits

    curl localhost:8000/v1/fill --json '{"text": "The \\[8] sat on \\[12].", "steps": 16}'
    """
    from maskless.serve.host import Limits
    from maskless.serve.run import Address, load
    from maskless.serve.run import serve as listen

    limits = Limits(length=max_length, steps=max_steps, batch=batch, queue=queue, seconds=timeout)
    address = Address(host=host, port=port, key=api_key)
    hosts = load([source for source in (model, mdlm, pictures) if source is not None], limits, device=device)

    def ready(page: str) -> None:
        names = ", ".join(one.name for one in hosts)
        show.out.print(f"{page}  ({names}; Ctrl-C stops)", highlight=False, soft_wrap=True)

    listen(hosts, limits, address, ready=ready)
