"""The command line: one file a command. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from redraft import __version__, ops
from redraft.cli import decide, fetch, generate, plan, serve, verify
from redraft.errors import RedraftError

app = typer.Typer(
    name="redraft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("decide")(decide.decide)
app.command("serve")(serve.serve)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("generate")(generate.generate)
app.command("fetch")(fetch.fetch)


def _version(wanted: bool) -> None:
    if wanted:
        verbose = {"-v", "--verbose"} & set(sys.argv)
        typer.echo(f"redraft {__version__}" + (f" ({ops.description()})" if verbose else ""))
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="With --version: also what computes."),
) -> None:
    """Speculative decoding for hybrid recurrent language models: exact rollback, counted memory, the
    decision.
    """


def main() -> None:
    """Run the command line."""
    try:
        app()
    except RedraftError as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/] {error}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output is gone
        sys.stderr.close()
        sys.exit(1)
