"""The commands. Each command imports its modules when it runs, so that the others start at once.

Exit status: 0 success, 1 the checkpoint is bad or the two differ, 2 the command failed.

It uses click, not typer: typer imports pydantic, which takes longer than all of `smckpt ls`.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

import click

from smckpt._version import __version__
from smckpt.cli.browse import browse
from smckpt.cli.models import apply, convert, follow_run, import_, publish, reload, reshard
from smckpt.cli.output import (
    VisibleFormatter,
    as_json,
    bytes_text,
    mtp,
    of_ranks,
    print_error,
    print_json,
    print_report,
    progress_bar,
    taken,
    threads,
    visible,
)
from smckpt.cli.proving import chaos, keeper, prove
from smckpt.cli.runs import doctor, ls, prune, status
from smckpt.cli.verify import diff, repair, verify
from smckpt.errors import CheckpointError, count_text
from smckpt.run.__main__ import run


class _Dtype(click.Choice[str]):
    """A dtype by its name, or by the field's short one."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        return super().convert(short.get(value, value), param, ctx)


def main() -> None:
    """The console script."""
    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal must not end in a traceback
            stream.reconfigure(errors="backslashreplace")
    out = sys.stdout
    try:
        try:
            status = app(standalone_mode=False)
        finally:
            if sys.stdout is not out:  # click has met a broken pipe, and exits with 1
                os._exit(_READER_GONE)
            out.flush()
    except CheckpointError as error:
        known = app.commands.get(*sys.argv[1:2]) if sys.argv[1:] else None
        print_error(error, [one.name for one in known.params if one.name] if known else [])
        status = 2
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = 2
    except click.ClickException as error:  # the command is called wrongly
        of = getattr(error, "ctx", None)
        help_of = f" — see {of.command_path} --help" if of is not None else ""
        text = " ".join(error.format_message().split()).rstrip(".")
        print(f"smckpt: {visible(text)}{help_of}", file=sys.stderr)
        status = error.exit_code
    except click.Abort:
        print("Aborted!", file=sys.stderr)
        status = 1
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os._exit(_READER_GONE)
    except OSError as error:  # an error of the output; files and stores raise smckpt's errors
        where = f"{error.filename}" if error.filename else "cannot print"
        print(visible(f"smckpt: {where}: {error.strerror}"), file=sys.stderr)
        os._exit(2)  # a normal exit would flush the buffer and fail again
    sys.exit(status)


# What a shell shows for a program that SIGPIPE ended. 1 would say that a checkpoint is bad.
_READER_GONE = 128 + signal.SIGPIPE


# What `smckpt --help` lists: the commands by what they are for, each in a few words.
_SECTIONS = {
    "Look": {
        "ls": "committed checkpoints in and below a directory",
        "doctor": "which step can be restored, and why no newer one",
        "status": "saves under way, the age of the newest step, failures",
        "show": "what is in a checkpoint, and who wrote it",
        "verify": "every byte against its checksum; an exported model",
        "diff": "which tensors and values of two checkpoints differ",
        "browse": "all checkpoints of a run on one HTML page",
    },
    "Keep, move, mend": {
        "cp": "copy a checkpoint, on disk or to and from S3",
        "rm": "remove a checkpoint",
        "prune": "remove the steps that rules do not keep",
        "repair": "commit what a dead coordinator could not; mend files",
    },
    "Change its form": {
        "export": "a Hugging Face model from a checkpoint",
        "import": "a checkpoint of tensor-parallel ranks from any model",
        "convert": "to torch DCP or torch.save, and from them",
        "reshard": "for another number of ranks",
    },
    "Serve": {
        "publish": "write what changed in a model",
        "apply": "bring a server's directory to the last publish",
        "reload": "let running servers (vLLM, SGLang) load it",
    },
    "Run a script": {
        "run": "with smckpt behind another system's names",
        "prove": "killed and resumed: is it exact?",
        "chaos": "killed in the middle of its saves",
        "keeper": "a service that holds a job's last steps in memory",
    },
}


class _Sections(click.Group):
    """A group of commands whose help lists them by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


@click.group(
    name="smckpt",
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with: smckpt ls ROOT; smckpt doctor ROOT; smckpt verify ROOT/STEP; "
    "smckpt export ROOT/STEP OUT --config config.json",
)
@click.version_option(__version__, message="%(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Find, show, verify and export smckpt checkpoints."""
    if context.invoked_subcommand != "run":  # a script sets up its own log, and only once
        handler = logging.StreamHandler()
        handler.setFormatter(VisibleFormatter("smckpt: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)


@app.command()
@click.argument("checkpoint")
@click.option(
    "--tensors", metavar="PATTERN", help="Only these tensors: a glob, or a part of the name."
)
@click.option("--stats", is_flag=True, help="Read the tensors: min, max, mean, std, NaN and inf.")
@as_json
def show(checkpoint: str, tensors: str | None, stats: bool, as_json: bool) -> None:
    """Show the contents of CHECKPOINT: topology, values, tensors, sizes, writers, metadata.

    Of a checkpoint that others wrote: its format, tensors and files.
    """
    from smckpt.checkpoint.reading.committed import CommittedCatalogue, open_any, open_catalogue
    from smckpt.cli.show import describe, describe_foreign, print_description, print_foreign
    from smckpt.storage import open_storage

    try:
        source: Any = open_catalogue(open_storage(checkpoint))
    except CheckpointError:
        from smckpt.formats.readers.rank_sources import open_source

        # where no reader of ours knows it, one of the user's may
        source = open_source(checkpoint) or open_any(open_storage(checkpoint))
    if isinstance(source, CommittedCatalogue):
        facts, print_tables = describe(source, tensors, stats), print_description
    elif stats:
        raise click.UsageError("--stats is for checkpoints of smckpt")
    else:
        facts, print_tables = describe_foreign(source, tensors), print_foreign
    if as_json:
        print_json(facts)
    else:
        print_tables(facts, tensors)


@app.command()
@click.argument("source")
@click.argument("target")
@threads
@as_json
def cp(source: str, target: str, threads: int, as_json: bool) -> None:
    """Copy the checkpoint in SOURCE to the directory TARGET, on disk or in S3.

    The files that its manifests name are copied and checked. After a copy was cut short, run the
    same command again: it copies the missing files only.
    """
    from smckpt.checkpoint.upkeep.transfer import copy_checkpoint

    with progress_bar("copying", quiet=as_json) as progress:
        report = copy_checkpoint(source, target, threads=threads, progress=progress)
    there = ""
    if report.files_present:
        there = f", of which {count_text(report.files_present, 'file')} "
        there += f"({bytes_text(report.nbytes_present)} of data) were there"
    print_report(
        as_json,
        report.to_json(),
        f"{count_text(report.files, 'file')}, {bytes_text(report.nbytes)}{there}, "
        f"{report.seconds:.1f} s: {report.target}",
    )


@app.command()
@click.argument("checkpoint")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def rm(checkpoint: str, yes: bool, as_json: bool) -> None:
    """Remove the newest checkpoint in CHECKPOINT: the files that its manifests name, no others."""
    from smckpt.checkpoint.commits.contents import contents_of
    from smckpt.checkpoint.commits.remove import remove_newest
    from smckpt.storage import open_storage

    top = open_storage(checkpoint)
    contents = contents_of(top)
    known = contents.commit.first.step
    step = "" if known is None else f" of step {known}"
    size = f"{count_text(contents.files, 'file')}, {bytes_text(contents.commit.nbytes)}"
    if not yes:
        click.confirm(
            f"Remove the checkpoint{step} at {contents.url} ({size})?", abort=True, err=True
        )
    report = remove_newest(top)
    left = "" if report.left is None else f"an older checkpoint is there now: {report.left}"
    print_report(as_json, report.to_json(), f"removed {size}: {report.path}", left)


@app.command()
@click.argument("checkpoint", nargs=-1, required=True)
@click.argument("out")
@of_ranks()
@click.option("--config", help="The model's config.json, or a directory with it and a tokenizer.")
@click.option(
    "--generation-config", help="The model's generation_config.json, if it is not beside --config."
)
@click.option("--tokenizer", help="A directory with the tokenizer, if it is not that of --config.")
@click.option(
    "--dtype",
    type=_Dtype(["float32", "bfloat16", "float16"]),
    help="Cast every floating tensor; fp32, bf16 and fp16 work too. By default as saved.",
)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Largest file, such as 512MiB."
)
@click.option("--prefix", help="The model's key in the saved state. By default found.")
@threads
@click.option("--overwrite", is_flag=True, help="Replace a model that is in OUT.")
@click.option(
    "--allow-nonfinite", is_flag=True, help="Export weights that contain NaN or infinity."
)
@click.option(
    "--allow-equal-ranks", is_flag=True,
    help="Export ranks of which two hold the same, such as experts that were made from one.",
)  # fmt: skip
@click.option(
    "--against-model/--no-against-model",
    default=True,
    help="Compare names and shapes with transformers' model of the config, if transformers "
    "is installed.",
)
@click.option(
    "--naming",
    type=click.Choice(["hub", "module"]),
    default="hub",
    show_default=True,
    help="The names of released models, or those of the saved state dict.",
)
@mtp
@click.option(
    "--lora",
    type=click.Choice(["adapter", "merge"]),
    help="For a PEFT model: the adapter alone, or merged into the base.",
)
@click.option("--lora-config", help="With --lora: adapter_config.json, or a directory with it.")
@click.option(
    "--lora-adapter", multiple=True, callback=lambda context, option, names: names or None,
    help="With --lora: the adapter's name, if there are several. With --lora merge it may be "
    "given several times; they are merged in this order.",
)  # fmt: skip
@click.option("--base", help="With --lora merge: a directory with the base's weights.")
@click.option("--card/--no-card", default=True, help="Write README.md, a model card.")
@click.option(
    "--gguf", metavar="TYPE",
    help="Also write a GGUF file (f16, bf16, q8_0, …) with llama.cpp's convert_hf_to_gguf.py.",
)  # fmt: skip
@click.option(
    "--gguf-converter", metavar="COMMAND",
    help="That script, or a command line that runs it. By default SMCKPT_GGUF_CONVERTER, or PATH.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0, show_default=True,
    help="Under torchrun: seconds without a byte of one process until all give up.",
)  # fmt: skip
@click.option(
    "--follow", is_flag=True,
    help="CHECKPOINT is the root of a run: export each step that it commits, until it is stopped.",
)  # fmt: skip
@click.option("--every", type=click.IntRange(1), help="With --follow: steps that this divides.")
@click.option("--until", type=click.IntRange(0), help="With --follow: end after this step.")
@click.option("--once", is_flag=True, help="With --follow: end when all steps are exported.")
@click.option(
    "--interval", type=click.FloatRange(0, min_open=True),
    help="With --follow: seconds between two looks for new steps. By default 10.",
)  # fmt: skip
@as_json
def export(
    checkpoint: tuple[str, ...], out: str, timeout: float, as_json: bool,
    follow: bool, every: int | None, until: int | None, once: bool, interval: float | None,
    **options: Any,
) -> None:  # fmt: skip
    """Write the model in CHECKPOINT to the directory OUT, as Hugging Face files.

    CHECKPOINT may also be the files of all ranks, tensor-parallel ranks innermost and pipeline
    stages outermost. Under torchrun
    (torchrun … -m smckpt.cli export …) each process writes some of the files.

    With --follow, CHECKPOINT is the root of a run. Its step at ROOT/100 comes to OUT/100, at low
    priority; a step that is exported already is left alone.
    """
    from smckpt.translate import Adapter, ExportOptions, Parallel, export_hf

    options["parallel"] = taken(Parallel, options)
    lora = {name: options.pop(name) for name in ("lora", "lora_config", "lora_adapter", "base")}
    if lora["lora"] is not None:
        options["adapter"] = Adapter(**lora)
    elif any(value is not None for value in lora.values()):
        raise click.UsageError("--lora-config, --lora-adapter and --base go with --lora")
    given = {"every": every, "until": until, "once": once or None, "interval": interval}
    given = {name: value for name, value in given.items() if value is not None}
    if follow:
        options["overwrite"] = True  # what has no record is the rest of an export
        options["options"] = taken(ExportOptions, options)
        follow_run(checkpoint, out, as_json, options, given)
        return
    if given:
        raise click.UsageError(f"--{next(iter(given))} needs --follow")
    from smckpt.translate.exports.options import export_group_of_environment

    source = checkpoint if len(checkpoint) > 1 else checkpoint[0]
    group = export_group_of_environment(timeout)
    follows = group is not None and not group.leads

    with progress_bar("exporting", quiet=as_json or follows) as progress:
        options["options"] = taken(
            ExportOptions, options, progress=progress, process_group=group, timeout=timeout
        )
        report = export_hf(source, out, **options)
    if follows:
        return
    print_report(
        as_json,
        asdict(report),
        f"{count_text(report.tensors, 'tensor')}, {bytes_text(report.nbytes)} in "
        f"{count_text(len(report.files), 'file')}, {report.seconds:.1f} s: {report.directory}",
        "" if report.source == "smckpt" else f"made from {report.source}",
        "" if report.gguf is None else f"GGUF: {report.gguf}",
    )


for command in (
    *(apply, browse, chaos, convert, diff, doctor, import_, keeper, ls, prove),
    *(prune, publish, reload, repair, reshard, run, status, verify),
):
    app.add_command(command)

# How each is called, at the end of its help.
_EXAMPLES = {
    "ls": "ls run --best loss:min:3",
    "doctor": "doctor --read run",
    "status": "status run",
    "show": "show run/1000 --tensors 'model.*' --stats",
    "verify": "verify run/1000",
    "diff": "diff run/900 run/1000 --ignore 'manager.*'",
    "browse": "browse run --out run.html",
    "cp": "cp run/1000 s3://bucket/run/1000",
    "rm": "rm run/1000",
    "prune": "prune run/step_{step} --keep-last 3 --keep-best loss:min:2 --dry-run",
    "repair": "repair run/1000 --from s3://bucket/run/1000",
    "export": "export run/1000 model --config config.json --dtype bf16",
    "import": "import llama run/0 --layout te_split --tp 2",
    "convert": "convert run/1000 run-dcp --to dcp",
    "reshard": "reshard run/1000 run-8 --shard 8",
    "publish": "publish model s3://bucket/model --delta block",
    "apply": "apply s3://bucket/model /serve/model",
    "reload": "reload /serve/model/latest http://127.0.0.1:8000",
    "run": "run --for transformers train.py",
    "prove": "prove -- torchrun --nproc-per-node 2 train.py --out {root}",
    "chaos": "chaos --moments 5 -- torchrun --nproc-per-node 2 train.py --out {root}",
    "keeper": "keeper job-1 --address 10.0.0.7 --budget 64",
}
for name, command in app.commands.items():
    command.epilog = f"\b\nSuch as:\n  smckpt {_EXAMPLES[name]}"  # \b: on one line, to be pasted
