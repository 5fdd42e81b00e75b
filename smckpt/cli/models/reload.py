"""The command `reload`."""

from __future__ import annotations

from dataclasses import asdict

import click

from smckpt.cli.output import print_json, print_line

__all__ = ["reload"]


@click.command()
@click.argument("directory")
@click.argument("server", nargs=-1, required=True)
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True,
              help="Seconds that a server may take.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def reload(directory: str, server: tuple[str, ...], timeout: float, as_json: bool) -> None:
    """Let running servers load the weights in DIRECTORY in place of theirs.

    SERVER is the URL of vLLM (started with VLLM_SERVER_DEV_MODE=1) or SGLang, which sees DIRECTORY
    at the same path: an export, or the link `latest` of `smckpt apply`. What it has cached of
    prompts is dropped.
    """
    from smckpt.translate.publishing.servers import reload_weights

    reports = [reload_weights(directory, url, timeout=timeout) for url in server]
    if as_json:
        print_json([asdict(report) for report in reports])
        return
    for report in reports:
        print_line(
            f"{report.server} ({report.kind}) has the weights of {report.directory}, "
            f"{report.seconds:.1f} s"
        )
